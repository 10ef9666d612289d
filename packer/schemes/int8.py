"""int8 weights with one scale per output channel, activations quantized per token at run time."""

from __future__ import annotations

from tilewright.packer.quant_config import compressed_tensors, w8a8_int8

from .scheme import CheckpointFormat, Scheme, StorageSpec

CHANNEL = StorageSpec("int8", "int8-channel")

INT8 = Scheme(
    id="int8",
    checkpoint_formats={
        "native": CheckpointFormat(CHANNEL, CHANNEL, w8a8_int8.write),
        "compressed-tensors": CheckpointFormat(CHANNEL, CHANNEL, compressed_tensors.write_int8, rotates=True),
    },
)
