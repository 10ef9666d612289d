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
    assert support.launch_for(1, 256).tile_m < support.launch_for(16384, 32).tile_m


@pytest.mark.parametrize("launch", [launch for _, launch in support.TUNED])
def test_sizes_fit_a_multiprocessor(launch: support.Launch) -> None:
    """227 KiB of shared memory and 64 Ki registers, with 24 for each of the producer's warpgroup of threads."""
    stage = 4096 * launch.consumers * launch.blocks + 128 * launch.tile_m
    buffers = launch.consumers * launch.tile_m * 64 * 2
    assert launch.programs * (launch.stages * stage + buffers + 2048) <= 227 * 1024
    assert launch.programs * 128 * (launch.consumers * launch.registers + 24) <= 65536
    assert not launch.turns or launch.consumers == 2
