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

from .help import F, option

if TYPE_CHECKING:
    from tilewright.packer.jobs.conversion import ConversionResult
    from tilewright.packer.progress import Progress

T = TypeVar("T")
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

    def _describe_range(self) -> str:
        return f"at least {self.min}"

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
        for one in reversed(options):
            function = one(function)
        return function

    return decorate


source_argument = click.argument("source", metavar="SOURCE")
output_argument = click.argument("output", metavar="OUTPUT", type=FOLDER)
RUNNING, REPORTING = "How the job runs", "What is printed"
json_option = option(
    "--json", "as_json", is_flag=True, group=REPORTING, help="Print one JSON document on stdout and nothing else."
)
debug_option = option(
    "--debug", is_flag=True, expose_value=False, group=REPORTING, help="Show a traceback when something fails."
)
run_options = stacked(
    option("--dry-run", is_flag=True, group=RUNNING, help="Print what would become of each tensor, and write nothing."),
    option("--resume", is_flag=True, group=RUNNING, help="Go on with what an interrupted run of this command left."),
    option("--overwrite", is_flag=True, group=RUNNING, help="Replace what an earlier run wrote to OUTPUT."),
    option(
        "--jobs",
        type=Least(1),
        metavar="N",
        group=RUNNING,
        help="Tensors that are converted at the same time.  [default: one per CPU]",
    ),
    option(
        "--memory",
        type=SIZE,
        group=RUNNING,
        help="Memory that the job may use, such as 8GiB; with less, fewer tensors are converted at the same time.  "
        "[default: four fifths of what is free]",
    ),
    option(
        "--max-shard-size",
        type=SIZE,
        default="5GB",
        show_default=True,
        group=RUNNING,
        help="Largest size of one output file.",
    ),
    option(
        "--consume",
        is_flag=True,
        group=RUNNING,
        help="Delete each file of SOURCE as soon as all that came of it is safely written.",
    ),
    option(
        "--ray",
        metavar="ADDRESS",
        group=RUNNING,
        help="Let the machines of this Ray cluster do the work, all of which see SOURCE and OUTPUT; `auto` finds the "
        "cluster of this machine.",
    ),
)


CALIBRATING = "Calibration (a text runs through SOURCE first)"
calibration_options = stacked(
    option(
        "--calibrate",
        "text",
        type=click.Path(path_type=Path),
        metavar="TEXT",
        group=CALIBRATING,
        help="UTF-8 text file. Needed by the solvers gptq and awq; also measures static activation scales for w4afp8.",
    ),
    option(
        "--calibrate-windows",
        "windows",
        type=Least(1),
        default=256,
        show_default=True,
        metavar="N",
        group=CALIBRATING,
        help="Number of passages that are taken from the text, evenly spaced.",
    ),
    option(
        "--calibrate-window",
        "window",
        type=Least(2),
        default=128,
        show_default=True,
        metavar="TOKENS",
        group=CALIBRATING,
        help="Length of each passage.",
    ),
    option(
        "--act-order/--no-act-order",
        default=None,
        group=CALIBRATING,
        help="For gptq: round the columns with the largest inputs first.  [default: act-order]",
    ),
    option(
        "--percentile",
        type=float,
        default=100.0,
        show_default=True,
        group=CALIBRATING,
        help="Percentage of activation values that a static activation scale must cover.",
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
    for name, spelled in CALIBRATION.items():
        if source(name) is click.core.ParameterSource.COMMANDLINE:
            raise OptionError(f"{spelled} needs --calibrate TEXT")
    return None


def progress_for(as_json: bool) -> Progress | None:
    """What a job tells its progress to: nobody beside JSON, else the default."""
    from tilewright.packer.progress import Silent

    return Silent() if as_json else None


def print_conversion(result: ConversionResult, following: str, *, as_json: bool) -> None:
    """Print what a conversion did, or would do, and the command that usually follows."""
    if as_json:
        print_json(result.to_json())
        return
    for output in result.outputs:
        click.echo(output.summary.table() if result.dry_run else f"{output.path}: {output.summary.line()}")
    if not result.dry_run:
        say(f"done in {duration(result.seconds)}; next: {following}")


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def say(message: str) -> None:
    """A message for people, on stderr."""
    click.echo(message, err=True)


def fail(message: str, hint: str | None, code: int = 1) -> NoReturn:
    """Print an error, the way out before the details, and leave with an exit code."""
    first, *details = message.split("\n")
    say("\n".join([f"error: {first}", *([f"hint: {hint}"] if hint else []), *details]))
    sys.exit(code)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
