"""Every variant of every encoding is read to the bit as the library that defines the format reads it."""

from __future__ import annotations

import pytest
import torch

from . import compressed_sources, float_sources, library_sources, recorded_sources  # noqa: F401  # add their variants
from .conftest import Read
from .sources import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_values(name: str, read: Read) -> None:
    source = VARIANTS[name]()
    expected = source.oracle(source.tensors, source.block)
    found = read(source.tensors, source.document(), source.metadata)
    assert found.keys() == expected.keys()
    for module, values in expected.items():
        assert torch.equal(found[module], values.to(torch.float32)), f"{(found[module] - values).abs().max()}"
        assert float(values.abs().max()) > 0
