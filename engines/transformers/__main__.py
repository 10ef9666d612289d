"""`python -m tilewright.engines.transformers PROGRAM [ARGUMENTS]`.

Runs a program that uses transformers, such as `lm_eval`; it takes packed directories wherever it takes checkpoints.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

import tilewright.engines.transformers  # noqa: F401  # registers the quantizer


def main() -> None:
    """Run a module that `python -m` could run, or a file of Python, with the rest of the arguments."""
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python -m tilewright.engines.transformers PROGRAM [ARGUMENTS], such as `lm_eval --model hf ...`"
        )
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    elif find_spec(program.partition(".")[0]) is None:
        sys.exit(f"{program}: no module of this name is installed, and it is no .py file")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
