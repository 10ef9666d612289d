"""FP8 E4M3 weights in blocks of 128 x 128, activations quantized at run time."""

from __future__ import annotations

from tilewright.packer.quant_config import compressed_tensors, fp8

from .scheme import CheckpointFormat, Scheme, StorageSpec

NATIVE = StorageSpec("fp8", "block-fp8")
COMPRESSED = StorageSpec("fp8", "block-fp8-ct")

BLOCK_FP8 = Scheme(
    id="block-fp8",
    checkpoint_formats={
        "native": CheckpointFormat(NATIVE, NATIVE, fp8.write),
        "compressed-tensors": CheckpointFormat(COMPRESSED, COMPRESSED, compressed_tensors.write_block_fp8),
    },
)
