"""The same random inputs in every run, and the shipped tiny models, quantized and packed once per run.

`pytest --hypothesis-seed=N` draws other inputs than the usual ones, for hypothesis and for torch.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tilewright.kernels import ops
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

MODELS = Path(__file__).parent.parent / "examples" / "models"
ISAS = [status.name for status in ops.kernel_report() if status.available]
SLOW = (  # beginnings of test ids that take more than about two seconds; `make test-fast` leaves them out
    "tests/cli/test_verify_accuracy.py",
    "tests/engines/transformers/test_attention.py::test_compiles",
    "tests/engines/transformers/test_families.py",
    "tests/engines/transformers/test_model.py",
    "tests/engines/vllm/",
    "tests/examples/",
    "tests/kernels/ops/test_convert.py::test_same_bits_as_the_formulas",
    "tests/kernels/ops/test_experts.py::test_odd_sizes",
    "tests/kernels/test_sanitizers.py",
    "tests/packer/calibrate/test_fold.py",
    "tests/packer/calibrate/test_observe.py",
    "tests/packer/engine/test_resources.py",
    "tests/packer/engine/test_resume.py",
    "tests/packer/pack/test_pack.py::test_no_code_changes",
    "tests/packer/quantize/test_any_source.py",
    "tests/packer/quantize/test_oracles.py",
    "tests/packer/verify/test_model.py",
    "tests/packer/verify/test_whole_model.py",
    "tests/test_demo.py",
    "tests/test_readme.py::test_readme_commands_run",
)
NOT_CHECKED = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


def pytest_configure(config: pytest.Config) -> None:
    """A machine may be as slow as it likes, and a run finds what the one before it found.

    Processes that share the tests (pytest -n) share the CPUs, too; each has at least one for itself.
    """
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the commands that a test starts
    usual = config.getoption("hypothesis_seed") is None
    settings.register_profile("repeatable", deadline=None, derandomize=usual, suppress_health_check=NOT_CHECKED)
    settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that measure memory take turns, and so do those that need a GPU; slow ones come first."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.path.name == "test_memory.py" or "peak_anonymous" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("memory"))
        elif "gpu" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("gpu"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed by the name of the test: its inputs do not depend on which tests ran before it."""
    seed = zlib.crc32(f"{item.config.getoption('hypothesis_seed')} {item.nodeid}".encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """quantized(model, scheme, form=None): directory of a tiny model in that scheme; "none" is the model itself."""

    @cache
    def quantize(model: str, scheme: str, form: str | None = None) -> Path:
        if scheme == "none":
            return MODELS / model
        output = tmp_path_factory.mktemp("quantized") / f"{model}-{scheme}-{form}"
        source = open_checkpoint(MODELS / model)
        execute(plan_quantize(source, QuantizeOptions(scheme, form)), source, output)
        return output

    return quantize


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, quantized: Callable[..., Path]) -> Callable[..., Path]:
    """packed(model, scheme, form=None): the same, packed for CPUs."""

    @cache
    def pack(model: str, scheme: str, form: str | None = None) -> Path:
        output = tmp_path_factory.mktemp("packed") / f"{model}-{scheme}-{form}"
        source = open_checkpoint(quantized(model, scheme, form))
        execute(plan_pack(source, CpuTarget()), source, output)
        return output

    return pack


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine can run, the emulated one included, chosen for one test."""
    before = ops.isa()
    ops.select_isa(request.param)
    yield request.param
    ops.select_isa(before)
