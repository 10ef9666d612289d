"""HQQ: codes of 1 to 8 bits, a word holding codes that lie far apart, with zero points that are no integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, Listed, QuantMethod, everywhere
from ..encoding import Decoder, StoredWeight, TensorGroup

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
TEXTS = ("packing", "compute_dtype", "unpack_view_dtype")
NUMBERS = ("nbits", "group_size", "axis", "view_as_float", "quant_scale", "quant_zero")
SAID = ("offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero")
STORED_SAID = ("nbits", "group_size", "axis")  # stored beside every weight, and in config.json


@dataclass(frozen=True)
class HqqDecoder(Decoder):
    """value = (code - zero) * scale in fp32, over the weight laid out as [-1, group] (axis 1) or [group, -1] (axis 0).

    A word of row r holds the codes of rows r, r + R, r + 2 R, …, the first in its highest bits, R rows of words.

    Attributes:
        bits: Bits of a code.
        k: Columns of the weight.
        width: Columns of the weight as it is laid out.
        axis: 1 if the rows of that share a scale, 0 if its columns do.
    """

    bits: int
    k: int
    width: int
    axis: int

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        first, last = rows.start * self.k, rows.stop * self.k
        index = torch.arange(first // self.width, -(-last // self.width))
        words, scale, zero = tensors
        height, count = len(words), 10 if self.bits == 3 else 8 // self.bits
        shifts = ((count - 1 - index // height) * self.bits).to(words.dtype).reshape(-1, 1)
        codes = ((words[index % height] >> shifts) & ((1 << self.bits) - 1)).to(torch.float32)
        scale, zero = (grid[index] if self.axis else grid for grid in (scale, zero))
        values = codes.sub_(zero.to(torch.float32)).mul_(scale.to(torch.float32)).flatten()
        skipped = first - first // self.width * self.width
        return values[skipped:][: last - first].reshape(-1, self.k)[:: rows.step]


@dataclass(frozen=True)
class HqqMethod:
    """`quant_method: hqq`, as transformers writes it: parameters for all Linears, or for some by the end of a path."""

    id: str = "hqq"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        skipped = fields.names("skip_modules")
        given = fields.inner("quant_config")
        fields.close()
        if given is None:
            raise fields.fail("quant_config", "is missing")
        if "weight_quant_params" in given.remaining():
            return everywhere(_numbers(given), skipped)
        skips = Listed(skipped)
        apart = {key: _numbers(inner) for key in given.remaining() if (inner := given.inner(key))}

        def declared(module: str) -> DeclaredNumbers | None:
            found = [numbers for key, numbers in apart.items() if f".{module}".endswith(f".{key}")]
            return None if module in skips else next(iter(found), None)

        return declared


def _numbers(fields: Fields) -> DeclaredNumbers:
    weight = fields.inner("weight_quant_params")
    fields.absent("scale_quant_params", "zero_quant_params")
    fields.skip("offload_meta")
    fields.close()
    if weight is None:
        raise fields.fail("weight_quant_params", "is missing")
    bits = weight.choose("nbits", tuple(PACKINGS), 4)
    size, axis = weight.number("group_size", 0), weight.choose("axis", (0, 1), 1)
    weight.absent("view_as_float")
    weight.choose("channel_wise", (True,), True)
    weight.skip("optimize", "round_zero")
    weight.close()
    return DeclaredNumbers("int", bits, (1, size), False, packing=f"hqq-{axis}")


@dataclass(frozen=True)
class Hqq:
    """`W_q` beside `scale` and `zero`, and a tensor for every number that says how they lie."""

    id: str = "hqq"
    suffixes: tuple[str, ...] = ("W_q", "scale", "zero", "shape", *NUMBERS, *TEXTS, *SAID)
    methods: tuple[QuantMethod, ...] = (HqqMethod(),)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        if "W_q" not in group.specs:
            return None
        if declared is None or not declared.packing.startswith("hqq"):
            return group.undeclared("HQQ codes", "W_q")
        if missing := group.missing("scale", "zero", "shape", "nbits", "group_size", "axis", "packing"):
            return missing
        try:
            said = {suffix: int(group.small(suffix)) for suffix in NUMBERS if suffix in group.specs}
            shape = [int(size) for size in group.small("shape").reshape(-1)]
            packing = bytes(group.small("packing").tolist()).decode()
            computed = bytes(group.small("compute_dtype").tolist()).decode() if "compute_dtype" in group.specs else ""
        except (ValueError, RuntimeError, TypeError, CheckpointError) as error:
            return group.reject(f"is described by tensors that cannot be read: {error}", suffix="W_q")
        if said.get("quant_scale") or said.get("quant_zero") or said.get("view_as_float"):
            reason = "has scales or zero points that are quantized themselves, or codes seen as floats"
            return group.reject(f"{reason}; HQQ without these is read", suffix="W_q")
        types = {str(group.specs[suffix].dtype) for suffix in ("scale", "zero")}
        if types != {computed or str(group.specs["scale"].dtype)}:
            return group.reject(
                f"is computed in {computed}, its scales and zero points are {sorted(types)}", suffix="W_q"
            )
        return self._weight(group, declared, said, shape, packing)

    def _weight(
        self, group: TensorGroup, declared: DeclaredNumbers, said: dict[str, int], shape: list[int], packing: str
    ) -> StoredWeight | Reject:
        assert declared.block
        bits, size, axis = (said[key] for key in STORED_SAID)
        stated = (declared.bits, declared.block[1] or size, int(declared.packing.removeprefix("hqq-")))
        if (bits, size, axis) != stated or PACKINGS.get(bits) != packing or len(shape) != 2 or min(*shape, size) < 1:
            reason = f"is described as {bits} bits in groups of {size} along axis {axis}, {packing}, of shape {shape}"
            return group.reject(f"{reason}; config.json says {stated}", suffix="W_q")
        count = shape[0] * shape[1]
        if count % size or (declared.block[1] == 0 and size != shape[1]):
            return group.reject(f"of shape {shape} has no groups of {size}", suffix="group_size")
        height, width = (count // size, size) if axis else (size, count // size)
        per_word = 10 if bits == 3 else 8 // bits
        if bits != 3 and height % per_word:
            return group.reject(f"is laid out in {height} rows, no multiple of {per_word}", suffix="W_q")
        grid = (FLOATS, (height, 1) if axis else (1, width))
        words = torch.int32 if bits == 3 else torch.uint8
        expected = {"W_q": (words, (-(-height // per_word), width)), "scale": grid, "zero": grid}
        if wrong := group.mismatch(expected, f"{bits} bits in groups of {size}"):
            return wrong
        names = tuple(group.names[suffix] for suffix in expected)
        kind = f"int{bits} HQQ group {size}"
        decoder = HqqDecoder(bits, shape[1], width, axis)
        whole = (shape[0], shape[1])
        return StoredWeight(group.module, names, group.others(*expected), whole, kind, decoder, foreign=True)


HQQ = Hqq()
