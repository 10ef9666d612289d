"""What the system refuses becomes one message that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.kernels.errors import InterruptError, TilewrightError


@contextmanager
def one_clear_message(output: Path) -> Iterator[None]:
    """Turn an interruption, a full disk or a refused file, on the way to writing `output`, into a `TilewrightError`."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptError(f"{output}: interrupted", hint="the same command with --resume goes on") from None
    except OSError as error:
        place = error.filename or output
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            hint = "nothing is lost: make room, then the same command with --resume goes on"
            raise TilewrightError(f"{place}: the disk is full: {error.strerror}", hint=hint) from error
        raise TilewrightError(f"{place}: {error.strerror}") from error
