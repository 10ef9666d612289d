"""Symmetric int4 weights in groups along K, 16-bit activations."""

from __future__ import annotations

from tilewright.packer.quant_config import compressed_tensors

from .scheme import CheckpointFormat, Scheme, StorageSpec

GROUPS = StorageSpec("int4", "pack-quantized")

INT4 = Scheme(
    id="int4",
    checkpoint_formats={
        "compressed-tensors": CheckpointFormat(GROUPS, GROUPS, compressed_tensors.write_int4, rotates=True)
    },
    solver="mse",
    groups=(128, 64, 32),
)
