"""One run at a time writes into an output: the lock is taken first, and under it everything is looked at again."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

from tilewright.kernels.errors import PlanError

from ..records.journal import JOURNAL, PARTIAL

LOCK = "lock"
ATTEMPTS = 100  # another run may end, and remove what we are about to lock, at any moment


class OutputLock:
    """The lock of an output directory, held from its making to `release`.

    It is a file in the folder for unfinished work, locked by `flock`, which the system gives back however the process
    ends. Who ends in good order removes file and folder; so a lock counts only if, once it is held, the file still has
    its name.

    Args:
        output: The directory; made if it is missing.
        mode: Permissions of a directory that is made, as far as the umask lets them through.

    Raises:
        PlanError: Another run holds it, or the file system has no locks.
    """

    def __init__(self, output: Path, mode: int = 0o755) -> None:
        self.folder = output / PARTIAL
        self._output = output
        self._made = _missing(output)
        self._fd = -1
        for _ in range(ATTEMPTS):
            if self._take(mode):
                return
        raise _taken(output)

    def _take(self, mode: int) -> bool:
        try:
            self._output.mkdir(mode, parents=True, exist_ok=True)
            self.folder.mkdir(mode, exist_ok=True)
            fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return False  # another run has just removed the folder
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = os.stat(self.folder / LOCK)
            if (named.st_dev, named.st_ino) == (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
                self._fd, fd = fd, -1
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                raise _taken(self._output) from None
            raise PlanError(
                f"{self._output}: cannot be locked: {error.strerror}",
                hint="two runs into one directory would destroy it; name a directory on a file system with locks",
            ) from error
        finally:
            if fd >= 0:
                os.close(fd)
        return False

    def release(self, *, finished: bool) -> None:
        """Give the lock back; what is unfinished stays for a later run unless the run `finished` or left nothing."""
        try:
            if finished:
                empty_folder(self.folder)
            if os.listdir(self.folder) == [LOCK]:
                os.unlink(self.folder / LOCK)
                os.rmdir(self.folder)
                for path in self._made:
                    path.rmdir()
        except OSError:
            pass  # another run has made its own lock in the meantime, or the output holds something
        finally:
            os.close(self._fd)


def empty_folder(folder: Path, but: str = LOCK) -> None:
    """Remove what is unfinished in its folder, but the lock and `but`; the journal first, for it names the rest."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != JOURNAL):
        if path.name in {LOCK, but}:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _missing(output: Path) -> list[Path]:
    """The directories that have to be made for `output`, innermost first."""
    return [path for path in (output, *output.parents) if not path.exists()]


def _taken(output: Path) -> PlanError:
    return PlanError(f"{output}: another run is writing there", hint="wait for it, or stop it")
