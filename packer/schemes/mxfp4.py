"""MXFP4 weights: FP4 in groups of 32 columns with powers of two as scales, 16-bit activations."""

from __future__ import annotations

from tilewright.packer.quant_config import compressed_tensors

from .scheme import CheckpointFormat, Scheme, StorageSpec

PACKED = StorageSpec("mxfp4", "mxfp4-pack-quantized")

MXFP4 = Scheme(
    id="mxfp4",
    checkpoint_formats={"compressed-tensors": CheckpointFormat(PACKED, PACKED, compressed_tensors.write_mxfp4)},
)
