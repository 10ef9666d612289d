"""Names that differ only in their numbers, told as one: `model.layers.{0-3}.mlp.gate`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from tilewright.kernels.tensors import Reject

NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")
RUNS = 3  # runs of numbers that are spelled out
LINES = 12  # kinds of refusals that are spelled out


def pattern(name: str) -> str:
    """The name without its numbers: equal for names that can be told as one."""
    return NUMBER.sub("#", name)


def with_ranges(names: Sequence[str]) -> str:
    """What names of one `pattern` have in common, each number that varies replaced by the numbers that occur."""
    texts = NUMBER.split(names[0])[::2]
    columns = [set(column) for column in zip(*map(NUMBER.findall, names), strict=True)]
    told = [next(iter(found)) if len(found) == 1 else f"{{{_runs(sorted(map(int, found)))}}}" for found in columns]
    return "".join(part for pair in itertools.zip_longest(texts, told, fillvalue="") for part in pair)


def _runs(numbers: list[int]) -> str:
    """`0-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    told = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(told) if len(told) <= RUNS else ",".join([*told[: RUNS - 1], "…", told[-1]])


def fold_rejects(rejects: Iterable[Reject]) -> tuple[list[str], str | None]:
    """Refusals for people: those of one kind on one line, those with a way out first.

    Returns:
        The lines, and the way out if there is one for all of them; else each line has its own.
    """
    kinds: dict[tuple[str, str, str | None], dict[str, None]] = {}
    for reject in rejects:
        kinds.setdefault((pattern(reject.name), reject.reason, reject.hint), {})[reject.name] = None
    hints = {hint for *_, hint in kinds}
    common = next(iter(hints)) if len(hints) == 1 else None
    ordered = sorted(kinds.items(), key=lambda kind: kind[0][2] is None)
    lines = [
        str(Reject(with_ranges(list(names)), reason, None if common else hint)) for (_, reason, hint), names in ordered
    ]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"… and {len(lines) - LINES + 1} more kinds"]
    return lines, common
