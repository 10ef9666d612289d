"""Quark of AMD: FP8 per tensor or per channel, which `scaled` reads, and MXFP4."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, QuantMethod
from ..encoding import StoredWeight, TensorGroup
from .fp4 import E8M0, Fp4Decoder

FP8_SCHEMES = {"per_tensor": (0, 0), "per_channel": (1, 0)}
SEEN = ("observer_cls", "scale_type", "round_method", "mx_element_dtype", "is_scale_quant", "is_dynamic", "symmetric")


@dataclass(frozen=True)
class QuarkMethod:
    """`quant_method: quark`: how all Linears are stored, and which of them otherwise, by glob."""

    id: str = "quark"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        excluded = fields.names("exclude")
        export = fields.inner("export")
        if export:
            export.choose("weight_format", ("real_quantized",), "real_quantized")
            export.choose("pack_method", ("reorder", "order"), "reorder")
            export.skip("kv_cache_group", "weight_merge_groups", "min_kv_scale", "kv_cache_dtype")
            export.close()
        fields.absent("algo_config", "layer_type_quant_config")
        fields.skip("quant_mode", "kv_cache_quant_config", "softmax_quant_spec", "kv_cache_post_rope", "version")
        everything = fields.inner("global_quant_config")
        layers = fields.inner("layer_quant_config")
        numbers = _numbers(everything) if everything else None
        apart = {
            pattern: _numbers(inner)
            for pattern in (layers.remaining() if layers else [])
            if layers and (inner := layers.inner(pattern))
        }
        fields.close()
        return _declared(numbers, apart, excluded)


def _declared(
    numbers: DeclaredNumbers | None, apart: dict[str, DeclaredNumbers | None], excluded: list[str]
) -> Callable[[str], DeclaredNumbers | None]:
    def names(entry: str, module: str) -> bool:
        return entry == module or fnmatch.fnmatchcase(module, entry)

    def declared(module: str) -> DeclaredNumbers | None:
        if any(names(entry, module) for entry in excluded):
            return None
        return next((found for entry, found in apart.items() if names(entry, module)), numbers)

    return declared


def _numbers(fields: Fields) -> DeclaredNumbers | None:
    """What one configuration of layers says of their weights; None if it leaves them alone."""
    weight = fields.inner("weight")
    fields.skip("input_tensors", "output_tensors", "bias", "target_device")
    fields.close()
    if weight is None:
        return None
    kind = weight.choose("dtype", ("fp8_e4m3", "fp4"))
    schemes = (*FP8_SCHEMES,) if kind == "fp8_e4m3" else ("per_group",)
    scheme = weight.choose("qscheme", schemes)
    if kind is None or scheme is None:
        raise weight.fail("dtype" if kind is None else "qscheme", "is missing")
    size = weight.take("group_size")
    axis = weight.take("ch_axis")
    scales = weight.choose("scale_format", ("float", "float32", "e8m0"), "e8m0" if kind == "fp4" else "float")
    if weight.take("zero_point"):
        raise weight.fail("zero_point", "is there, which is not read for floating codes")
    weight.choose("is_dynamic", (False,), False)
    weight.choose("symmetric", (True, False))
    weight.skip(*SEEN, "scale_calculation_mode", "qat_spec")
    weight.close()
    if kind == "fp4":
        if size != 32 or axis not in {-1, 1, None} or scales != "e8m0":
            raise weight.fail(
                "group_size", f"is {size!r} along axis {axis!r} with scales {scales}; MXFP4 has 32, -1, e8m0"
            )
        return DeclaredNumbers("float", 4, (1, 32), packing="mxfp4-quark")
    if scheme == "per_channel" and axis not in {0, None}:
        raise weight.fail("ch_axis", f"is {axis!r}, 0 is read")
    if scales == "e8m0" or size not in {None, 0, -1}:
        raise weight.fail("group_size", f"is {size!r} with scales {scales}, which is not read for FP8 {scheme}")
    return DeclaredNumbers("float", 8, FP8_SCHEMES[scheme])


@dataclass(frozen=True)
class QuarkFp4:
    """MXFP4 of Quark: `weight` uint8 [N, K / 2], the even column in the low nibble, `weight_scale` E8M0 [N, K / 32]."""

    id: str = "mxfp4-quark"
    suffixes: tuple[str, ...] = ("weight", "weight_scale")
    methods: tuple[QuantMethod, ...] = (QuarkMethod(),)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        spec, declared = group.specs.get("weight"), group.declared
        if spec is None or not group.is_matrix() or declared is None or declared.packing != self.id:
            return None
        if spec.dtype.is_floating_point and len(group.specs) == 1:
            return None
        if missing := group.missing("weight_scale"):
            return missing
        *experts, n, half = spec.shape
        expected = {
            "weight": (torch.uint8, spec.shape),
            "weight_scale": (E8M0, (*experts, n, -(-half // 16))),
        }
        if half % 16:
            return group.reject(f"has {half * 2} columns, no whole groups of 32")
        if wrong := group.mismatch(expected, "MXFP4 of Quark"):
            return wrong
        names = (group.names["weight"], group.names["weight_scale"])
        others = group.others("weight", "weight_scale")
        return StoredWeight(group.module, names, others, (*experts, n, half * 2), "MXFP4 of Quark", Fp4Decoder(32))


QUARK_FP4 = QuarkFp4()
