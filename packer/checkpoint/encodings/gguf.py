"""GGUF: rows in blocks of 32 or 256 columns, which the gguf package takes apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, QuantMethod, everywhere
from ..encoding import Decoder, StoredWeight, TensorGroup

KEY = "gguf"
WAY_OUT = "convert it to another type with llama.cpp's quantize tool first"


@dataclass(frozen=True)
class GgufDecoder(Decoder):
    """The values that gguf.quants.dequantize gives for each row, in fp32.

    Attributes:
        kind: Type of the blocks: "Q4_K", ….
        heads: Heads whose rows the file has in pairs, row 2 i + j of a head for row i + j * half; 0 for none.
    """

    kind: str
    heads: int = 0

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        import gguf

        raw = tensors[0]
        if self.heads:
            index = torch.arange(len(raw)).reshape(self.heads, -1, 2).transpose(1, 2).reshape(-1)
            stored = raw[index[rows]]
        else:
            stored = raw[rows]
        values = gguf.quants.dequantize(stored.contiguous().numpy(), gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(values)


@dataclass(frozen=True)
class GgufMethod:
    """What `gguf_file` says of a source: its metadata tell the type of each tensor."""

    id: str = KEY

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        fields.close()
        return everywhere(DeclaredNumbers("", packing=KEY))


@dataclass(frozen=True)
class Gguf:
    """`weight` uint8 [N, bytes of a row], or stacks of them [E, N, bytes of a row]."""

    id: str = KEY
    suffixes: tuple[str, ...] = ("weight",)
    methods: tuple[QuantMethod, ...] = (GgufMethod(),)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        if declared is None or declared.packing != self.id or "weight" not in group.specs:
            return None
        name, spec = group.names["weight"], group.specs["weight"]
        said = group.details.described(f"{KEY}.{name}")
        if not said:
            return None
        import gguf

        kind, columns, heads = str(said["type"]), int(said["columns"]), int(said["heads"])
        if not group.is_matrix():
            return group.reject(f"is no matrix: {list(spec.shape)} bytes of {kind}", WAY_OUT)
        type_id = gguf.GGMLQuantizationType[kind]
        if type_id not in gguf.quants._type_traits and kind not in {"F32", "F16"}:
            return group.reject(f"is {kind} of GGUF, which the gguf package does not dequantize", WAY_OUT)
        block, size = gguf.GGML_QUANT_SIZES[type_id]
        if columns % block or spec.dtype != torch.uint8 or spec.shape[-1] != columns // block * size:
            return group.reject(f"is {list(spec.shape)} bytes, {columns} columns of {kind} are others", WAY_OUT)
        whole = (*spec.shape[:-1], columns)
        encoding = f"GGUF-{kind}"
        return StoredWeight(group.module, (name,), (), whole, encoding, GgufDecoder(kind, heads), foreign=True)


GGUF = Gguf()
