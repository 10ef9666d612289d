"""Run tasks on threads within a budget of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

Work = tuple[int, Callable[[], None]]  # bytes that it needs, and what to call


class Workers:
    """Threads that take tasks in their order, as long as those that run need no more than `budget` bytes together.

    Threads, not processes: torch's kernels, our own, reading, writing and hashing all release the interpreter lock,
    and threads share the mapped source, the open files and the hash. Each runs torch on its share of the CPUs only.

    Args:
        works: The tasks.
        count: Threads.
        budget: Bytes; a task that alone needs more runs alone.
    """

    def __init__(self, works: Iterable[Work], count: int, budget: int) -> None:
        self._queue = iter(works)
        self._count = count
        self._budget = budget
        self._turn = threading.Lock()  # held while waiting for memory, so that tasks start in their order
        self._changed = threading.Condition()  # guards everything below
        self._used = 0
        self._error: BaseException | None = None
        self._stopped = False

    def run(self) -> None:
        """Run all tasks.

        Raises:
            BaseException: Whatever the first failing task raised, or what interrupts the wait; no task runs any more.
        """
        torch_threads = torch.get_num_threads()
        share = max(1, torch_threads // self._count)
        threads = [threading.Thread(target=self._work, args=(share,)) for _ in range(self._count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            torch.set_num_threads(torch_threads)
        self.check()

    def check(self) -> None:
        """Raise what stopped the run, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self, error: BaseException | None = None) -> None:
        """Start no further task; `error` is what `run` raises unless there is an earlier one."""
        with self._changed:
            self._stopped = True
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether a task failed or somebody stopped the run: who waits for other tasks must give up."""
        return self._stopped

    def _work(self, torch_threads: int) -> None:
        torch.set_num_threads(torch_threads)
        try:
            while (work := self._take()) is not None:
                cost, call = work
                call()
                with self._changed:
                    self._used -= cost
                    self._changed.notify_all()
        except BaseException as error:
            self.stop(error)

    def _take(self) -> Work | None:
        with self._turn:
            work = next(self._queue, None)
            if work is None:
                return None
            with self._changed:
                while not self._stopped and self._used and self._used + work[0] > self._budget:
                    self._changed.wait()
                if self._stopped:
                    return None
                self._used += work[0]
            return work
