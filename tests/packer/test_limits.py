"""Limits of containers, as the kernel spells them: both versions of control groups, nested, limit minus use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilewright.packer.limits import available_memory, cpu_count

GIB = 1 << 30


def system(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """A root directory as the kernel shows it."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n"
    everything = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, "proc/meminfo": meminfo, **files}
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def test_no_limits(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/user\n", V2, {"sys/fs/cgroup/user/memory.max": "max\n"})
    assert (cpu_count(root), available_memory(root)) == (64, 48 * GIB)


def test_version_2_nested(tmp_path: Path) -> None:
    """The tightest of all groups around the process counts, each with its own use."""
    files = {
        "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.current": f"{GIB // 2}\n",
    }
    root = system(tmp_path, "0::/a/b\n", V2, files)
    assert (cpu_count(root), available_memory(root)) == (3, 3 * GIB)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/box/memory.stat": f"cache 9\ntotal_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    root = system(tmp_path, "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n", V1, files)
    assert (cpu_count(root), available_memory(root)) == (2, 3 * GIB // 2)


def test_a_container_sees_its_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    mount = "30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    files = {"sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}
    for path in ("/docker/abc", "/", "/../../elsewhere"):
        root = system(tmp_path, f"0::{path}\n", mount, files)
        assert (cpu_count(root), available_memory(root)) == (1, GIB)


def test_more_than_is_used_leaves_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}
    assert available_memory(system(tmp_path, "0::/\n", V2, files)) == 0
