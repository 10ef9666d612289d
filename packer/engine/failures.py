"""What the system refuses becomes one message that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.kernels.errors import InterruptError, TilewrightError

# How torch and Python say that an allocation or the start of a thread was refused.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "can't start new thread", "Cannot allocate memory")


@contextmanager
def one_clear_message(output: Path) -> Iterator[None]:
    """Turn an interruption, a full disk or a refused file, on the way to writing `output`, into a `TilewrightError`."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptError(f"{output}: interrupted", hint="the same command with --resume goes on") from None
    except MemoryError as error:
        raise _out_of_memory(output) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise _out_of_memory(output) from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise _out_of_memory(output) from error
        place = error.filename or output
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            hint = "nothing is lost: make room, then the same command with --resume goes on"
            raise TilewrightError(f"{place}: the disk is full: {error.strerror}", hint=hint) from error
        raise TilewrightError(f"{place}: {error.strerror}") from error


def _out_of_memory(output: Path) -> TilewrightError:
    hint = "--jobs 1 or a smaller --memory needs less (`ulimit -v` and a container's limit count too); --resume goes on"
    return TilewrightError(f"{output}: the system gives no more memory", hint=hint)
