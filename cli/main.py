"""The entry points: one per command, and `tilewright COMMAND` for those who like a single one.

Nothing heavy is imported here: a command's module is loaded when it is asked for, and torch only when it runs.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from tilewright import __version__
from tilewright.kernels.errors import InterruptError, OptionError, TilewrightError

from .options import fail, say

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

COMMANDS = {  # each is a click command of the same name in the module of the same name
    "quantize-model": "Quantize a checkpoint to block FP8, int8, int4, MXFP4 or W4AFP8.",
    "pack-for-cpu": "Write the weights in the order in which CPU kernels read them.",
    "pack-for-gpu": "Write int4 experts in the order in which Hopper kernels read them.",
    "verify-accuracy": "Compare a converted model with its source.",
    "inspect-model": "Print what a directory or file holds.",
    "repair": "Bring a published checkpoint to what engines read, or check it.",
    "publish": "Upload an output to the hub, with a model card.",
}
SHORT = {  # names for those who type them often
    "quantize": "quantize-model",
    "pack": "pack-for-cpu",
    "verify": "verify-accuracy",
    "inspect": "inspect-model",
}


class Commands(click.Group):
    """Loads a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, or of this short name."""
        name = SHORT.get(cmd_name, cmd_name)
        return load(name) if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without loading any of them."""
        short = {name: f"{name}, {alias}" for alias, name in SHORT.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(short.get(name, name), text) for name, text in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A first session."""
        with formatter.section("A first session"):
            for line in FIRST_SESSION:
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


FIRST_SESSION = (
    "tilewright quantize org/model quantized --scheme int8",
    "tilewright pack quantized packed",
    "tilewright verify org/model packed --level layers",
)


def load(name: str) -> click.Command:
    """Import a command."""
    python_name = name.replace("-", "_")
    command = getattr(importlib.import_module(f"tilewright.cli.{python_name}"), python_name)
    assert isinstance(command, click.Command)
    return command


@click.group(cls=Commands)
@click.version_option(__version__, message="%(version)s")
def tilewright() -> None:
    """Quantize and pack Hugging Face checkpoints offline, and verify the result.

    `tilewright COMMAND --help` explains a command; each is also a program of its own, such as quantize-model.
    """


class Notes(logging.Handler):
    """Prints what a job logs on stderr: `note: …` for what deserves attention."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        say(f"note: {record.getMessage()}" if record.levelno >= logging.WARNING else record.getMessage())


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code.

    0 done, 1 refused or failed, 2 wrong usage, 3 below a threshold, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    log = logging.getLogger("tilewright")
    log.handlers, log.propagate = [Notes()], False
    log.setLevel(logging.INFO)
    try:
        code = command.main(list(arguments), prog_name=name, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(WRONG_USAGE if isinstance(error, click.UsageError) else FAILED)
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted", None, INTERRUPTED)
    except BrokenPipeError:
        sys.stdout = None  # the reader has left; nothing may be flushed at exit
        sys.exit(FAILED)
    except Exception as error:
        code = _exit_code(error)
        if "--debug" in arguments:
            traceback.print_exc()
            sys.exit(code)
        if isinstance(error, TilewrightError):
            fail(error.message, error.hint, code)
        if isinstance(error, OSError) and error.strerror:
            fail(f"{error.filename or 'output'}: {error.strerror}", None)
        fail(f"{type(error).__name__}: {error}", "this is a bug; --debug shows where it happened")


def _exit_code(error: Exception) -> int:
    if isinstance(error, OptionError):
        return WRONG_USAGE
    return INTERRUPTED if isinstance(error, InterruptError) else FAILED


def main() -> NoReturn:
    """`tilewright`."""
    run(tilewright, "tilewright")


def quantize_model() -> NoReturn:
    """`quantize-model`."""
    run(load("quantize-model"), "quantize-model")


def pack_for_cpu() -> NoReturn:
    """`pack-for-cpu`."""
    run(load("pack-for-cpu"), "pack-for-cpu")


def pack_for_gpu() -> NoReturn:
    """`pack-for-gpu`."""
    run(load("pack-for-gpu"), "pack-for-gpu")


def verify_accuracy() -> NoReturn:
    """`verify-accuracy`."""
    run(load("verify-accuracy"), "verify-accuracy")


def inspect_model() -> NoReturn:
    """`inspect-model`."""
    run(load("inspect-model"), "inspect-model")
