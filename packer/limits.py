"""What this process may use: CPUs and memory, as its control groups (versions 1 and 2, nested) and `ulimit` say."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class ControlGroup:
    """A control group that this process is in, or one around it.

    Attributes:
        path: Its directory.
        version: 1 or 2: files have other names.
    """

    path: Path
    version: int

    def number(self, name: str) -> int | None:
        """The number in one of its files; None where there is no file or no limit."""
        words = self._words(name)
        return int(words[0]) if words and words[0].lstrip("-").isdecimal() else None

    def cpus(self) -> float | None:
        """CPUs that it may use, by its quota; None without one."""
        if self.version == 2:
            words = self._words("cpu.max")
            quota, period = (int(word) if word.isdecimal() else 0 for word in (*words, "0", "0")[:2])
        else:
            quota, period = self.number("cpu.cfs_quota_us") or 0, self.number("cpu.cfs_period_us") or 0
        return quota / period if quota > 0 and period > 0 else None

    def memory(self) -> int | None:
        """Bytes that it may still take: its limit without what it uses; None without a limit.

        Pages of files that nobody has used for a while do not count: the system takes them back first.
        """
        limit, used, idle = ("memory.max", "memory.current", "inactive_file")
        if self.version == 1:
            limit, used, idle = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        most = self.number(limit)
        if most is None or most >= 1 << 62:  # how version 1 says that there is none
            return None
        stat = self._words("memory.stat")
        inactive = int(stat[stat.index(idle) + 1]) if idle in stat else 0
        return max(most - max((self.number(used) or 0) - inactive, 0), 0)

    def _words(self, name: str) -> list[str]:
        try:
            return (self.path / name).read_text(encoding="ascii").split()
        except OSError:
            return []


def control_groups(root: Path = ROOT) -> Iterator[ControlGroup]:
    """Every control group that limits this process, from its own outwards, of both versions."""
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for line in _lines(root / "proc/self/mountinfo"):
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind not in {"cgroup", "cgroup2"}:
            continue
        names = [""] if kind == "cgroup2" else [name for name in options.split(",") if name in {"cpu", "memory"}]
        for path in {own[name] for name in names if name in own}:
            mount = root / fields[4].lstrip("/")
            below = Path(path).relative_to(fields[3]) if Path(path).is_relative_to(fields[3]) else Path()
            for folder in (mount / below, *(mount / below).parents):
                if folder.is_relative_to(mount):
                    yield ControlGroup(folder, 2 if kind == "cgroup2" else 1)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def cpu_count(root: Path = ROOT) -> int:
    """CPUs that this process may use: those that it may run on, or fewer by the quota of a container."""
    quotas = [quota for group in control_groups(root) if (quota := group.cpus()) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas)]))


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process can get without swapping, by the system, its control groups and `ulimit -v`."""
    kib = {key: int(rest.split()[0]) for key, rest in (line.split(":") for line in _lines(root / "proc/meminfo"))}
    left = [kib["MemAvailable"] << 10]
    left += [memory for group in control_groups(root) if (memory := group.memory()) is not None]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(_lines(Path("/proc/self/statm"))[0].split()[0])
        left.append(max(limit - pages * resource.getpagesize(), 0))
    return min(left)
