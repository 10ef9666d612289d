"""bitsandbytes: NF4 and FP4 codes in blocks along the flattened weight, and int8 with a scale for each row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, QuantMethod, everywhere
from ..encoding import Decoder, StoredWeight, TensorGroup

STORAGE = {  # what 4-bit codes may be stored as: `bnb_4bit_quant_storage`
    "uint8": torch.uint8,
    "int8": torch.int8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
# Values of the 16 codes; of NF4, quantiles of a normal distribution (Dettmers et al. 2023, appendix E).
TABLES = {
    "nf4": (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
    + (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
STATE = "weight.quant_state.bitsandbytes__"
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
INT8_STEP = 7.874015718698502e-3  # 1 / 127, as the library multiplies by it


@dataclass(frozen=True)
class BlockDecoder(Decoder):
    """value[i] = table[code[i]] * absmax[i // block] over the flattened weight; the first code is in the high nibble.

    With nested scales, absmax[b] = nested_table[code of absmax[b]] * nested_absmax[b // nested_block] + offset, fp32.

    Attributes:
        k: Columns.
        block: Elements that share a scale.
        nested_block: Scales that share a scale of their own; 0 if scales are stored as fp32.
        offset: Added to scales that are stored as codes.
    """

    k: int
    block: int
    nested_block: int = 0
    offset: float = 0.0

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        first, last = rows.start * self.k, rows.stop * self.k
        raw = tensors[0].reshape(-1).view(torch.uint8)[first // 2 : (last + 1) // 2]
        codes = torch.stack((raw >> 4, raw & 15), -1).flatten()[first % 2 :][: last - first]
        blocks = torch.arange(first // self.block, -(-last // self.block))
        scales = self._scales(tensors, blocks).repeat_interleave(self.block)[first % self.block :][: last - first]
        return tensors[1][codes.to(torch.int64)].mul_(scales).reshape(-1, self.k)[:: rows.step]

    def _scales(self, tensors: Sequence[torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
        stored = tensors[2][blocks]
        if not self.nested_block:
            return stored
        values = tensors[4][stored.to(torch.int64)] * tensors[3][blocks // self.nested_block]
        return values + self.offset


@dataclass(frozen=True)
class RowDecoder(Decoder):
    """value[n, k] = code[n, k] * SCB[n] / 127, multiplied in fp32 from the left as the library does."""

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        return tensors[0][rows] * tensors[1][rows].reshape(-1, 1) * INT8_STEP


@dataclass(frozen=True)
class BitsAndBytesMethod:
    """`quant_method: bitsandbytes`, as transformers writes it."""

    id: str = "bitsandbytes"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        in_4bit = fields.flag("load_in_4bit", fields.flag("_load_in_4bit", False))
        in_8bit = fields.flag("load_in_8bit", fields.flag("_load_in_8bit", False))
        fields.skip("_load_in_4bit", "_load_in_8bit")
        if in_4bit == in_8bit:
            raise fields.fail("load_in_4bit", "and `load_in_8bit`: one of them has to be true")
        kind = fields.choose("bnb_4bit_quant_type", tuple(TABLES), "fp4")
        storage = fields.choose("bnb_4bit_quant_storage", tuple(STORAGE), "uint8")
        nested = fields.flag("bnb_4bit_use_double_quant", False)
        skipped = fields.names("llm_int8_skip_modules")
        fields.absent("llm_int8_has_fp16_weight")
        fields.skip("bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload")
        fields.close()
        four = DeclaredNumbers(kind, 4, symmetric=not nested, packing="bnb-4bit", scale_dtype=storage)
        return everywhere(four if in_4bit else DeclaredNumbers("int", 8, (1, 0), packing="bnb-8bit"), skipped)


@dataclass(frozen=True)
class FourBit:
    """`weight` [N * K / 2, 1] beside `weight.absmax`, `weight.quant_map`, a state in JSON, and nested scales."""

    id: str = "bnb-4bit"
    suffixes: tuple[str, ...] = (
        *("weight", "weight.quant_map", "weight.absmax", *NESTED),
        *(STATE + kind for kind in TABLES),
    )
    methods: tuple[QuantMethod, ...] = (BitsAndBytesMethod(),)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        kinds = [kind for kind in TABLES if STATE + kind in group.specs]
        if "weight" not in group.specs or not ("weight.absmax" in group.specs or kinds):
            return None
        if declared is None or declared.packing != self.id:
            return group.undeclared("4-bit codes of bitsandbytes", "weight")
        if missing := group.missing(STATE + declared.kind, "weight.absmax", "weight.quant_map"):
            return missing
        if kinds != [declared.kind]:
            return group.reject(f"has the states of {' and '.join(kinds)}; config.json says {declared.kind}")
        nested = NESTED if not declared.symmetric else ()
        if missing := group.missing(*nested):
            return missing
        state = _state(group, STATE + declared.kind)
        wanted = {"quant_type", "blocksize", "dtype", "shape"}
        wanted |= {"nested_blocksize", "nested_dtype", "nested_offset"} if nested else set()
        if set(state) != wanted or state["quant_type"] != declared.kind:
            reason = f"describes {state}; {declared.kind}{' with nested scales' * bool(nested)} is expected"
            return group.reject(reason, suffix=STATE + declared.kind)
        shape, block = state["shape"], state["blocksize"]
        sizes = (*shape, block, state.get("nested_blocksize", 1)) if isinstance(shape, list) else (shape,)
        if not all(type(size) is int and size > 0 for size in sizes) or len(sizes) != 4 or shape[0] * shape[1] % 2:
            return group.reject(f"says shape {shape} in blocks of {block}", suffix=STATE + declared.kind)
        if state.get("nested_dtype", "float32") != "float32":
            return group.reject(f"has nested scales of {state['nested_dtype']}", suffix=STATE + declared.kind)
        return self._weight(group, declared, state, nested)

    def _weight(
        self, group: TensorGroup, declared: DeclaredNumbers, state: dict[str, Any], nested: tuple[str, ...]
    ) -> StoredWeight | Reject:
        (n, k), block = state["shape"], state["blocksize"]
        storage = STORAGE[declared.scale_dtype]
        blocks = -(-n * k // block)
        count = n * k // 2 // storage.itemsize
        expected: dict[str, tuple[Any, Any]] = {
            "weight": (storage, {(count, 1), (1, count)}),
            "weight.quant_map": (torch.float32, (16,)),
            "weight.absmax": (torch.uint8 if nested else torch.float32, (blocks,)),
        }
        if nested:
            grid = (-(-blocks // state["nested_blocksize"]),)
            expected |= {nested[0]: (torch.float32, grid), nested[1]: (torch.float32, (256,))}
        elif strange := [suffix for suffix in NESTED if suffix in group.specs]:
            return group.reject("is there, config.json says nothing of nested scales", suffix=strange[0])
        if wrong := group.mismatch(expected, f"{declared.kind.upper()} of shape {[n, k]} in blocks of {block}"):
            return wrong
        table = torch.tensor(TABLES[declared.kind])
        if not torch.allclose(group.small("weight.quant_map"), table, rtol=0, atol=1e-6):
            return group.reject(f"is not the table of {declared.kind}", suffix="weight.quant_map")
        offset, size = (state["nested_offset"], state["nested_blocksize"]) if nested else (0.0, 0)
        if not isinstance(offset, float | int):
            return group.reject(f"says nested_offset {offset!r}", suffix=STATE + declared.kind)
        return StoredWeight(
            group.module,
            tuple(group.names[suffix] for suffix in expected),
            group.others(*expected),
            (n, k),
            f"{declared.kind.upper()} of bitsandbytes, block {block}",
            BlockDecoder(k, block, size, float(offset)),
            foreign=True,
        )


def _state(group: TensorGroup, suffix: str) -> dict[str, Any]:
    """The JSON object that a tensor of bytes holds; empty if it holds none."""
    spec = group.specs[suffix]
    if spec.dtype != torch.uint8 or len(spec.shape) != 1:
        return {}
    try:
        found = json.loads(bytes(group.small(suffix).tolist()))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class EightBit:
    """`weight` int8 [N, K] beside `SCB` fp32 [N]; `weight_format` says that rows follow one another."""

    id: str = "bnb-8bit"
    suffixes: tuple[str, ...] = ("weight", "SCB", "weight_format")
    methods: tuple[QuantMethod, ...] = ()

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        if "weight" not in group.specs or not group.is_matrix():
            return None
        is_declared = declared is not None and declared.packing == self.id
        if "SCB" not in group.specs and not (is_declared and group.specs["weight"].dtype == torch.int8):
            return None
        if not is_declared:
            return group.undeclared("int8 codes of bitsandbytes", "weight")
        if missing := group.missing("SCB"):
            return missing
        n, *columns = group.specs["weight"].shape
        expected: dict[str, tuple[Any, Any]] = {"weight": (torch.int8, (n, *columns)), "SCB": (torch.float32, (n,))}
        if "weight_format" in group.specs:
            expected["weight_format"] = (torch.uint8, {(), (1,)})
        if len(columns) != 1:
            return group.reject("is no matrix")
        if wrong := group.mismatch(expected, "int8 of bitsandbytes"):
            return wrong
        if "weight_format" in group.specs and int(group.small("weight_format")) != 0:
            reason = "says that its rows are laid out for one kind of GPU"
            return group.reject(reason, "save it with a newer bitsandbytes", suffix="weight_format")
        names = (group.names["weight"], group.names["SCB"])
        others = group.others("weight", "SCB")
        shape = (n, columns[0])
        return StoredWeight(group.module, names, others, shape, "int8 of bitsandbytes", RowDecoder(), foreign=True)


BNB_4BIT, BNB_8BIT = FourBit(), EightBit()
