"""Options and messages that several commands share. Imports nothing heavy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


class Size(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions
    """A number of bytes: `800M`, `5GB` (powers of ten), `16GiB` (powers of two)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse it."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?|)B?", str(value), re.IGNORECASE)
        if not found:
            self.fail(f"`{value}` is not a size such as 800M, 5GB or 16GiB", param, ctx)
        unit = found[2].capitalize()
        size = int(float(found[1]) * UNITS[unit])
        return size if size > 0 else self.fail(f"`{value}` is not more than zero", param, ctx)


SIZE = Size()
FOLDER = click.Path(path_type=Path)


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several option decorators as one; `--help` lists them in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


source_argument = click.argument("source", metavar="SOURCE")
output_argument = click.argument("output", metavar="OUTPUT", type=FOLDER)
dry_run_option = click.option("--dry-run", is_flag=True, help="Print what would be done, and stop.")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else."
)
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
run_options = stacked(
    click.option("--jobs", type=click.IntRange(1), help="Tasks at the same time; the CPUs at hand by default."),
    click.option("--memory", type=SIZE, help="Memory to stay below, such as 8GiB; lowers the number of tasks."),
    click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Size of one output file."),
    click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped."),
    click.option("--overwrite", is_flag=True, help="Replace what an earlier run wrote."),
    click.option("--consume", is_flag=True, help="Delete each source shard when all that came of it is safe."),
)


def say(message: str) -> None:
    """A message for people, on stderr."""
    click.echo(message, err=True)


def fail(message: str, hint: str | None) -> NoReturn:
    """Print an error and leave with exit code 1."""
    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")
    sys.exit(1)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
