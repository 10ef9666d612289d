"""torchao, as transformers saves it: parts of a weight under `_weight_…`, described in the metadata of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernels.ops.convert import split_nibbles
from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, QuantMethod, everywhere
from ..encoding import Decoder, StoredWeight, TensorGroup
from .scaled import ScaledDecoder, ShiftedDecoder

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
ACTIVATIONS = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
KNOWN_TYPES = ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
# What a description of each may say beside the sizes; all of it concerns activations or how kernels run.
RUN = (
    "act_quant_kwargs",
    "reduce_range",
    "mm_config",
    "kernel_preference",
    "activation_quantization",
    "activation_dtype",
)
WAY_OUT = "load it with torchao, call `dequantize()` on its weights, and save it"


@dataclass(frozen=True)
class Int4Decoder(Decoder):
    """value[n, k] = code[n, k] * scale[k // group, n] + zero[k // group, n] in fp32; low nibble = even column.

    Attributes:
        group: Columns that share a scale.
    """

    group: int

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        codes = split_nibbles(tensors[0][rows].contiguous().view(torch.uint8), flip=8).to(torch.float32).sub_(8)
        scale, zero = (tensor[:, rows].T.to(torch.float32).repeat_interleave(self.group, 1) for tensor in tensors[1:])
        return codes.mul_(scale).add_(zero)


@dataclass(frozen=True)
class TorchAoMethod:
    """`quant_method: torchao`; what it says is said again, of every weight, by the metadata of the files."""

    id: str = "torchao"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        fields.skip("quant_type", "quant_type_kwargs", "include_input_output_embeddings", "untie_embedding_weights")
        fields.skip("include_embedding")
        skipped = fields.names("modules_to_not_convert")
        fields.close()
        return everywhere(DeclaredNumbers("", packing="torchao"), skipped)


@dataclass(frozen=True)
class TorchAo:
    """`_weight_qdata` beside `_weight_scale` and, of integers, `_weight_zero_point`."""

    id: str = "torchao"
    suffixes: tuple[str, ...] = (CODES, SCALE, ZERO, *ACTIVATIONS)
    methods: tuple[QuantMethod, ...] = (TorchAoMethod(),)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        if CODES not in group.specs:
            return None
        if declared is None or declared.packing != self.id:
            return group.undeclared("codes of torchao", CODES)
        said = group.details.described(f"{group.module}.weight")
        kind, data, parts = said.get("_type"), said.get("_data"), said.get("_tensor_data_names")
        if not isinstance(data, dict) or not isinstance(parts, list):
            return group.reject("is not described in the metadata of its file", WAY_OUT, CODES)
        if kind not in KNOWN_TYPES:
            reason = f"is a {kind} of torchao, laid out for one kernel; read are {', '.join(KNOWN_TYPES)}"
            return group.reject(reason, WAY_OUT, CODES)
        stored = {suffix.removeprefix("_weight_") for suffix in group.specs}
        if set(parts) != stored:
            return group.reject(
                f"consists of {sorted(map(str, parts))}, but {sorted(stored)} are there", WAY_OUT, CODES
            )
        strange = set(data) - {"block_size", "dtype", "shape", "target_dtype", *RUN}
        if strange:
            return group.reject(f"is described with `{min(strange)}`, which is not read", WAY_OUT, CODES)
        return self._weight(group, str(kind), data)

    def _weight(self, group: TensorGroup, kind: str, data: dict[str, Any]) -> StoredWeight | Reject:
        stored, block = group.specs[CODES].shape, data.get("block_size")
        if len(stored) != 2 or not _sizes(block):
            return group.reject(f"is {list(stored)} in blocks of {block}", WAY_OUT, CODES)
        n, k = stored[0], stored[1] * (2 if kind == "Int4Tensor" else 1)
        assert isinstance(block, list)
        grid = (n // block[0], k // block[1])
        if n % block[0] or k % block[1] or ("shape" in data and data["shape"] != [n, k]):
            return group.reject(f"is {[n, k]} in blocks of {block} of shape {data.get('shape')}", WAY_OUT, CODES)
        scales: Any = (FLOATS, {grid, *([()] if grid == (1, 1) else [])})
        expected: dict[str, Any] = {CODES: (torch.int8, stored), SCALE: scales}
        if kind == "Float8Tensor":
            expected[CODES] = (torch.float8_e4m3fn, stored)
            decoder: Decoder = ScaledDecoder(block[0] if grid[0] > 1 else 0, block[1] if grid[1] > 1 else 0)
            if grid[0] == 1 < grid[1]:
                return group.reject(f"has one row of {grid[1]} scales", WAY_OUT, CODES)
        elif block[0] != 1:
            return group.reject(f"has blocks of {block}, integers are read with scales for each row", WAY_OUT, CODES)
        elif kind == "Int4Tensor":
            expected[CODES] = ((torch.int8, torch.uint8), stored)
            expected |= {SCALE: (FLOATS, grid[::-1]), ZERO: (FLOATS, grid[::-1])}
            decoder = Int4Decoder(block[1])
        else:
            expected[ZERO] = (torch.int8, grid)
            if kind == "Int8Tensor" and ZERO not in group.specs:
                del expected[ZERO]
                decoder = ScaledDecoder(1, block[1] if grid[1] > 1 else 0)
            else:
                decoder = ShiftedDecoder(8, k, block[1], 0)
        if missing := group.missing(*expected):
            return missing
        if wrong := group.mismatch(expected, f"{kind} in blocks of {block}"):
            return wrong
        if ZERO in group.specs and ZERO not in expected:
            return group.reject("has zero points beside floating codes", WAY_OUT, ZERO)
        names = tuple(group.names[suffix] for suffix in expected)
        bits = {"Int4Tensor": "int4", "Float8Tensor": "FP8"}.get(kind, _bits(data))
        encoding = f"{bits} of torchao in blocks of {block[0]}x{block[1]}"
        return StoredWeight(group.module, names, group.others(*expected), (n, k), encoding, decoder, foreign=True)


def _sizes(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _bits(data: dict[str, Any]) -> str:
    target = data.get("target_dtype")
    return str(target.get("_data", "int8")) if isinstance(target, dict) else "int8"


TORCHAO = TorchAo()
