"""The one family of errors that Tilewright raises on purpose.

A message names its subject (file or tensor), the value, the rule and the way out. The command line prints it without a
traceback and exits with 1; everything else that escapes is a bug.
"""

from __future__ import annotations

from collections.abc import Iterable

MESSAGE, HINT = 1600, 300  # characters of a message and of its hint: more is no message for people


def printable(text: str) -> str:
    """`text` with everything escaped that is no printable character, such as colours and changes of direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _limited(text: str, limit: int) -> str:
    """The lines of `text`, printable, with the last ones counted beyond `limit` characters."""
    lines = [printable(line) for line in text.split("\n")]
    kept: list[str] = []
    for number, line in enumerate(lines):
        room = limit - sum(len(one) + 1 for one in kept)
        if len(line) > room:
            kept += [f"{line[: room - 40]}…"] if not kept or room > 200 else []
            more = len(lines) - max(number, 1)
            return "\n".join([*kept, *([f"  and {more} more lines"] if len(lines) > 1 and more else [])])
        kept.append(line)
    return "\n".join(kept)


def quoted(text: str, limit: int = 200) -> str:
    """`text` as a message may show it: on one line, printable, in backticks, shortened in the middle beyond `limit`."""
    text = printable(text)
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit // 2) :]}"
    return f"`{text}`"


class TilewrightError(Exception):
    """Something in the input or the request cannot be served.

    Args:
        message: Subject, fact with value and rule, without a final period; further lines hold details. What is not
            printable is escaped, and beyond 1,600 characters lines are counted.
        hint: What the user can do about it; printed on a line of its own after the first.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = _limited(message, MESSAGE)
        self.hint = None if hint is None else _limited(hint, HINT)
        super().__init__(self.message)

    def __str__(self) -> str:
        first, *details = self.message.split("\n")
        return "\n".join([first, *([f"hint: {self.hint}"] if self.hint else []), *details])


class OptionError(TilewrightError):
    """Options that are not allowed, or not together; the command line exits with 2, as for every wrong usage."""


class InterruptError(TilewrightError):
    """The user stopped a job (Ctrl-C); the command line exits with 130."""


class CheckpointError(TilewrightError):
    """A checkpoint or one of its files is missing, damaged or inconsistent."""


class SchemeError(TilewrightError):
    """A weight cannot be quantized in the requested scheme."""


class LayoutError(TilewrightError):
    """Tensors do not fit a layout, or are not what the layout says."""


class PlanError(TilewrightError):
    """A job is refused before any weight is read; carries every reason at once."""


class VerifyError(TilewrightError):
    """A verification cannot be carried out (a result below its threshold is not an error, see exit code 3)."""


class PublishError(TilewrightError):
    """A directory must not be published, or the hub refuses it."""


class KernelUnavailableError(TilewrightError):
    """No bundled kernel can run this; the message lists the candidates and why each declined."""


def check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    """Refuse a value that is none of `choices`; None stands for the default.

    Raises:
        OptionError: It is none of them.
    """
    choices = tuple(choices)
    if value is not None and value not in choices:
        raise OptionError(f"{option}: {quoted(str(value))} is not one of {', '.join(choices)}")


def check_least(option: str, value: float | None, least: float) -> None:
    """Refuse a number below `least`; None stands for the default.

    Raises:
        OptionError: It is less.
    """
    if value is not None and value < least:
        raise OptionError(f"{option}: {value} is less than {least}")
