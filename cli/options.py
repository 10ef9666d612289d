"""Options and messages that several commands share. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from tilewright.kernels.errors import OptionError, check_choice, check_least

if TYPE_CHECKING:
    from tilewright.packer.jobs.conversion import ConversionResult
    from tilewright.packer.progress import Progress

T = TypeVar("T")
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


class Choice(click.Choice):  # type: ignore[type-arg]
    """One of some words, refused in the words of the Python interface."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check it."""
        check_choice(_option(param), value, self.choices)
        return value


class Least(click.IntRange):
    """A whole number that is not too small, refused in the words of the Python interface."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse and check it."""
        try:
            number = int(value)
        except ValueError:
            self.fail(f"`{value}` is not a whole number", param, ctx)
        assert self.min is not None
        check_least(_option(param), number, self.min)
        return number


def _option(param: click.Parameter | None) -> str:
    return param.opts[0] if param else "value"


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
    click.option("--jobs", type=Least(1), help="Tasks at the same time; the CPUs at hand by default."),
    click.option("--memory", type=SIZE, help="Memory to stay below, such as 8GiB; lowers the number of tasks."),
    click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Size of one output file."),
    click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped."),
    click.option("--overwrite", is_flag=True, help="Replace what an earlier run wrote."),
    click.option("--consume", is_flag=True, help="Delete each source shard when all that came of it is safe."),
)


calibration_options = stacked(
    click.option(
        "--calibrate",
        "text",
        type=click.Path(path_type=Path),
        metavar="TEXT",
        help="Run this text through the source, layer by layer: for gptq, awq, and the static scales of w4afp8.",
    ),
    click.option(
        "--calibrate-windows",
        "windows",
        type=Least(1),
        default=256,
        show_default=True,
        help="Windows of the text, evenly spaced.",
    ),
    click.option(
        "--calibrate-window",
        "window",
        type=Least(2),
        default=128,
        show_default=True,
        metavar="TOKENS",
        help="Tokens in each of them.",
    ),
    click.option(
        "--act-order/--no-act-order",
        default=None,
        help="Whether gptq rounds the columns with the largest inputs first; it does by default.",
    ),
    click.option(
        "--percentile",
        type=float,
        default=100.0,
        show_default=True,
        help="Share of an activation that its static scale covers, in percent.",
    ),
)
CALIBRATION = {
    "text": "--calibrate",
    "windows": "--calibrate-windows",
    "window": "--calibrate-window",
    "act_order": "--act-order",
    "percentile": "--percentile",
}


def taken(options_class: type[T], options: dict[str, Any]) -> T:
    """Take the fields of a class of options out of what a command was given."""
    assert dataclasses.is_dataclass(options_class)
    return options_class(**{field.name: options.pop(field.name) for field in dataclasses.fields(options_class)})


def calibration_taken(options: dict[str, Any]) -> dict[str, Any] | None:
    """Take the options of a calibration out of what a command was given; None without a text."""
    given = {name: options.pop(name) for name in CALIBRATION}
    if given["text"] is not None:
        return given
    source = click.get_current_context().get_parameter_source
    for name, option in CALIBRATION.items():
        if source(name) is click.core.ParameterSource.COMMANDLINE:
            raise OptionError(f"{option} needs --calibrate TEXT")
    return None


def progress_for(as_json: bool) -> Progress | None:
    """What a job tells its progress to: nobody beside JSON, else the default."""
    from tilewright.packer.progress import Silent

    return Silent() if as_json else None


def print_conversion(result: ConversionResult, *, as_json: bool) -> None:
    """Print what a conversion did, or would do."""
    if as_json:
        print_json(result.to_json())
        return
    for output in result.outputs:
        click.echo(output.summary.table() if result.dry_run else f"{output.path}: {output.summary.line()}")


def say(message: str) -> None:
    """A message for people, on stderr."""
    click.echo(message, err=True)


def fail(message: str, hint: str | None, code: int = 1) -> NoReturn:
    """Print an error and leave with an exit code."""
    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")
    sys.exit(code)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
