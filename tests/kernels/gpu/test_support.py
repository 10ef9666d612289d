from __future__ import annotations

import warnings

import pytest

from tilewright.kernels.errors import KernelUnavailableError
from tilewright.kernels.gpu import support


@pytest.fixture(autouse=True)
def _fresh() -> None:
    support.use_gluon.cache_clear()


def test_tested_release_on_hopper_is_quiet_and_fast() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert support.use_gluon((9, 0), support.TESTED_TRITON[0])


@pytest.mark.parametrize(
    ("capability", "version", "words"),
    [
        ((9, 0), "99.0.0", "Triton 99.0.0 was not tested"),
        ((8, 9), "3.6.0", "8.9 is not 9.0"),
        ((10, 0), "3.6.0", "10.0"),
    ],
)
def test_slower_way_says_why_once(capability: tuple[int, int], version: str, words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        assert not support.use_gluon(capability, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not support.use_gluon(capability, version)


@pytest.mark.parametrize(
    ("capability", "version", "words"), [((8, 0), "3.6.0", "8.0"), ((9, 0), None, "not installed")]
)
def test_refusals_name_the_way_out(capability: tuple[int, int], version: str | None, words: str) -> None:
    with pytest.raises(KernelUnavailableError, match=words) as caught:
        support.use_gluon(capability, version)
    assert caught.value.hint


def test_every_load_has_sizes() -> None:
    launches = [support.triton_launch_for(rows, 32) for rows in (1, 32, 256, 2048, 16384)]
    assert launches[0].block_m == 16
    assert launches[-1].block_m == 128
    few, some, many = (support.launch_for(rows, 32) for rows in (256, 257, 2561))
    assert [few, some, many] == [launch for _, launch in support.TUNED]
    assert support.launch_for(80, 1) is some
    assert support.launch_for(81, 1) is many


@pytest.mark.parametrize("launch", [launch for _, launch in support.TUNED])
def test_sizes_fit_a_multiprocessor(launch: support.Launch) -> None:
    """228 KiB of shared memory, 1 of them taken per program, and 64 Ki registers, 24 for each producing thread."""
    rows = 1 << (launch.tile_m - 1).bit_length()
    stage = 4096 * 2 * launch.blocks + 128 * rows
    buffers, barriers = 2 * min(rows, launch.piece) * 64 * 2, 256
    assert launch.programs * (launch.stages * stage + buffers + barriers + 1024) <= 228 * 1024
    assert launch.programs * 128 * (2 * launch.registers + 24) <= 65536
    assert launch.programs * 384 * (launch.max_registers or 168) <= 65536
