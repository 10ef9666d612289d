"""Quantization configs of FP8 and int8 weights with one element per code, of ModelOpt and of GPT-OSS."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace

from ...families.experts import ExpertSpellings
from ..declared import Declared, DeclaredNumbers, Fields, Listed, everywhere

ACTIVATIONS = ("dynamic", "static")
SPELLINGS = ExpertSpellings()


def _pair(fields: Fields, key: str) -> tuple[int, int] | None:
    """Two sizes, None if the key is absent or null."""
    value = fields.take(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(x) is int and x > 0 for x in value):
        raise fields.fail(key, f"is {value!r}, two sizes are expected")
    return value[0], value[1]


@dataclass(frozen=True)
class Fp8Method:
    """`quant_method: fp8`: per tensor, or in blocks; SGLang, vLLM, transformers and DeepSeek write it.

    DeepSeek-V4 stores routed experts in FP4 beside it, and says so by `expert_dtype`.
    """

    id: str = "fp8"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        fields.choose("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        fields.choose("activation_scheme", ACTIVATIONS, "dynamic")
        fields.choose("scale_fmt", ("ue8m0", "float32", "fp32"))
        experts = fields.choose("expert_dtype", ("fp8", "fp4"), "fp8")
        block = _pair(fields, "weight_block_size")
        skipped = [name for key in SKIP_LISTS for name in fields.names(key)]
        fields.skip("kv_cache_quant_algo", "kv_cache_scheme", "packed_modules_mapping", "store_dtype", "dequantize")
        fields.skip("modules_to_convert", "linear_class")
        fields.close()
        plain = DeclaredNumbers("float", 8, block)
        packed = DeclaredNumbers("float", 4, (1, 32), packing="mxfp4")

        def declared(module: str) -> DeclaredNumbers | None:
            if experts == "fp4" and SPELLINGS.container(module):
                return packed
            return plain

        skips = Listed(skipped)
        return lambda module: None if module in skips else declared(module)


SKIP_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True)
class PlainCodes:
    """A method whose codes lie as they are, one element each.

    Attributes:
        id: Value of `quant_method`.
        numbers: What it declares of every module; blocks of the config replace those of it.
    """

    id: str
    numbers: DeclaredNumbers

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        fields.choose("activation_scheme", ACTIVATIONS, "dynamic")
        block = _pair(fields, "weight_block_size")
        skipped = [name for key in SKIP_LISTS for name in fields.names(key)]
        fields.choose("group_size", (128,))
        fields.skip("packed_modules_mapping")
        fields.close()
        numbers = self.numbers
        if block and numbers.block is None:
            numbers = replace(numbers, block=block)
        return everywhere(numbers, skipped)


W8A8_INT8 = PlainCodes("w8a8_int8", DeclaredNumbers("int", 8, (1, 0)))
W8A8_FP8 = PlainCodes("w8a8_fp8", DeclaredNumbers("float", 8, (1, 0)))
BLOCK_INT8 = PlainCodes("blockwise_int8", DeclaredNumbers("int", 8))
# Its experts are int4 beside FP8 Linears, and engines read no more of the config than its name: shapes tell them apart.
W4AFP8 = PlainCodes("w4afp8", DeclaredNumbers("", packing="w4afp8"))


@dataclass(frozen=True)
class FixedMethod:
    """A method whose name says what the numbers are; its config only lists what it leaves alone.

    Attributes:
        id: Value of `quant_method`.
        numbers: What it declares of every module.
        ignored: Keys that say nothing about the stored weights.
        refused: Keys that must be absent.
    """

    id: str
    numbers: DeclaredNumbers
    ignored: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        skipped = fields.names("modules_to_not_convert")
        fields.skip(*self.ignored)
        fields.absent(*self.refused)
        fields.close()
        return everywhere(self.numbers, skipped)


FBGEMM_FP8 = FixedMethod("fbgemm_fp8", DeclaredNumbers("float", 8, (1, 0)), ignored=("activation_scale_ub",))
MXFP4 = FixedMethod("mxfp4", DeclaredNumbers("float", 4, (1, 32), packing="mxfp4"), refused=("dequantize",))  # GPT-OSS


ALGORITHMS = {
    "FP8": DeclaredNumbers("float", 8, (0, 0)),
    "FP8_PER_CHANNEL_PER_TOKEN": DeclaredNumbers("float", 8, (1, 0)),
    "FP8_PB_WO": DeclaredNumbers("float", 8, (128, 128)),
    "NVFP4": DeclaredNumbers("float", 4, (1, 16), packing="nvfp4-modelopt"),
    "W4A16_NVFP4": DeclaredNumbers("float", 4, (1, 16), packing="nvfp4-modelopt"),
    "MXFP8": DeclaredNumbers("float", 8, (1, 32), packing="mxfp8-quantized"),
}


@dataclass(frozen=True)
class ModelOptMethod:
    """`quant_method: modelopt`, in config.json or as hf_quant_config.json says it."""

    id: str = "modelopt"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        mixed = {**ALGORITHMS, "MIXED_PRECISION": None}
        algorithm = fields.choose("quant_algo", tuple(mixed), "FP8")
        groups = {algorithm: mixed[algorithm]}
        size = fields.take("group_size")
        _check_size(fields, size, mixed[algorithm])
        fields.absent("has_zero_point", "pre_quant_scale")
        skipped = [*fields.names("exclude_modules"), *fields.names("ignore")]
        fields.skip("kv_cache_quant_algo", "kv_cache_scheme", "producer", "config_groups")
        layers = fields.inner("quantized_layers")
        apart: dict[str, DeclaredNumbers | None] = {}
        for module in layers.remaining() if layers else []:
            layer = layers.inner(module) if layers else None
            if layer:
                name = layer.choose("quant_algo", tuple(ALGORITHMS), None)
                if name is None:
                    raise layer.fail("quant_algo", "is missing")
                _check_size(layer, layer.take("group_size"), ALGORITHMS[name])
                layer.close()
                apart[module] = ALGORITHMS[name]
        fields.close()
        everything = groups[algorithm]
        if algorithm == "MIXED_PRECISION" and layers is None:  # how SGLang knows W4AFP8 from ModelOpt's own mixtures
            everything = W4AFP8.numbers

        def declared(module: str) -> DeclaredNumbers | None:
            if any(fnmatch.fnmatchcase(module, entry) or module == entry for entry in skipped):
                return None
            return apart.get(module, everything)

        return declared


def _check_size(fields: Fields, size: object, numbers: DeclaredNumbers | None) -> None:
    """The stated group has to be that of the algorithm."""
    known = numbers.block[1] if numbers and numbers.block else 0
    if size not in {None, known} and not (size == 0 and known < 16):
        raise fields.fail("group_size", f"is {size!r}, this algorithm has groups of {known}")


METHODS = (*(Fp8Method(), W8A8_INT8, W8A8_FP8, BLOCK_INT8, FBGEMM_FP8, ModelOptMethod()),)
