"""GPTQ: codes packed along K, zero points along N, an optional order of activations. Also what AutoRound exports so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.model_names import HEAD
from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, Listed, QuantMethod
from ..encoding import StoredWeight, TensorGroup
from .affine import AffineDecoder, int4_format, layout_id
from .bits import along_columns, along_rows, packed_words

KNOWN_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GptqDecoder(AffineDecoder):
    """Tensors qweight int32 [K * bits / 32, N], scales [G, N], qzeros int32 [G, N * bits / 32], and g_idx [K].

    Attributes:
        offset: Added to every stored zero point: 1 in the first version of the format, 0 in the second.
        has_order: Whether the group of each column is stored in `g_idx`.
        n: Rows of the matrix.
    """

    offset: int = 1
    has_order: bool = False
    n: int = 0

    def unpack(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.unpack`."""
        return along_columns(tensors[0][:, rows], self.bits, self.k).T

    def scales(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.scales`."""
        return tensors[1][:, rows].T

    def zeros(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor | None:
        """See `AffineDecoder.zeros`.

        Raises:
            SchemeError: A zero point of the first version is stored as the largest code: some readers take it for 0,
                others for one more than any code.
        """
        stored = along_rows(tensors[2], self.bits, self.n)[:, rows].T
        if self.offset and bool((stored == (1 << self.bits) - 1).any()):
            reason = f"a stored zero point is {(1 << self.bits) - 1}, which readers of this format take differently"
            raise SchemeError(reason, hint="save it in the second version of the format (`gptq_v2`)")
        return stored + self.offset

    def groups(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `AffineDecoder.groups`."""
        if not self.has_order:
            return super().groups(tensors)
        index = tensors[3].to(torch.int64)
        if bool(((index < 0) | (index >= len(tensors[1]))).any()):
            raise SchemeError(f"g_idx names groups outside of 0 to {len(tensors[1]) - 1}", hint="it is damaged")
        return index

    def height(self, tensors: Sequence[torch.Tensor]) -> int:
        """See `AffineDecoder.height`."""
        return self.n


@dataclass(frozen=True)
class GptqMethod:
    """`quant_method: gptq`, as AutoGPTQ, GPTQModel and transformers write it."""

    id: str = "gptq"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        version = fields.choose("checkpoint_format", ("gptq", "gptq_v2"))
        version = fields.choose("format", ("gptq", "gptq_v2"), version) or "gptq"
        numbers = DeclaredNumbers(
            "int",
            fields.choose("bits", KNOWN_BITS),
            (1, max(fields.number("group_size", 128), 0)),
            fields.flag("sym", True),
            fields.flag("desc_act", False),
            version,
        )
        if not numbers.bits:
            raise fields.fail("bits", "is missing")
        dynamic = fields.inner("dynamic")
        has_head = fields.flag(HEAD, False)
        skipped = Listed(fields.names("modules_to_not_convert"))
        fields.absent("pack_dtype" if fields.take("pack_dtype", "int32") != "int32" else "", "rotation", "adapter")
        fields.skip(*HOW_MADE, "quantizer", "meta", "backend", "exllama_config", "use_exllama", "max_input_length")
        overrides = _overrides(dynamic, numbers) if dynamic else []
        fields.close()

        def declared(module: str) -> DeclaredNumbers | None:
            if module in skipped or (not has_head and module.rpartition(".")[2] == HEAD):
                return None
            for pattern, found in overrides:
                if pattern.match(module):
                    return found
            return numbers

        return declared


HOW_MADE = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "dataset", "tokenizer", "mse"),
    *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id"),
    *("cache_block_outputs", "modules_in_block_to_quantize", "model_name_or_path", "model_file_base_name"),
    *(
        "act_group_aware",
        "is_marlin_format",
        "v2",
        "v2_alpha",
        "v2_memory_device",
        "is_distributed",
        "parallel_packing",
    ),
)


def _overrides(dynamic: Fields, numbers: DeclaredNumbers) -> list[tuple[re.Pattern[str], DeclaredNumbers | None]]:
    """GPTQModel's `dynamic`: `-:regex` leaves modules alone, `+:regex` or a regex gives them other numbers."""
    found: list[tuple[re.Pattern[str], DeclaredNumbers | None]] = []
    for key in dynamic.remaining():
        try:
            pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise dynamic.fail(key, f"is not a regular expression: {error}") from error
        inner = dynamic.inner(key)
        if key.startswith("-:"):
            found.append((pattern, None))
            continue
        if inner is None:
            raise dynamic.fail(key, "is no object")
        block = (1, max(inner.number("group_size", numbers.block[1] if numbers.block else 128), 0))
        changed = replace(
            numbers,
            bits=inner.choose("bits", KNOWN_BITS, numbers.bits),
            block=block,
            symmetric=inner.flag("sym", numbers.symmetric),
            by_activation=inner.flag("desc_act", numbers.by_activation),
        )
        inner.skip(*HOW_MADE)
        inner.close()
        found.append((pattern, changed))
    return found


@dataclass(frozen=True)
class AutoRoundMethod:
    """`quant_method: auto-round` (`intel/auto-round`): codes of GPTQ or of AWQ, as `packing_format` says."""

    id: str = "auto-round"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        packing = fields.choose("packing_format", tuple(AUTO_ROUND_PACKINGS))
        if packing is None:
            raise fields.fail("packing_format", "is missing, and nothing else tells how codes lie")
        fields.choose("data_type", ("int",), "int")
        bits = fields.choose("bits", KNOWN_BITS)
        if not bits:
            raise fields.fail("bits", "is missing")
        block = (1, max(fields.number("group_size", 128), 0))
        symmetric = fields.flag("sym", True)
        numbers = DeclaredNumbers("int", bits, block, symmetric, packing=AUTO_ROUND_PACKINGS[packing])
        extra = fields.inner("extra_config")
        skipped = Listed(fields.names("modules_to_not_convert"))
        fields.skip("act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic")
        fields.skip(*AUTO_ROUND_MADE)
        special = {key: _special(extra, key, numbers) for key in extra.remaining()} if extra else {}
        fields.close()

        def declared(module: str) -> DeclaredNumbers | None:
            if module in skipped:
                return None
            for key, found in special.items():
                if key == module or (re.search(r"[*+?\[\]\\^$|()]", key) and re.search(key, module)):
                    return found
            return numbers

        return declared


AUTO_ROUND_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "gemm",
}
AUTO_ROUND_MADE = (
    *("iters", "autoround_version", "block_name_to_quantize", "quant_block_list", "enable_quanted_input", "lr"),
    *(
        "minmax_lr",
        "enable_minmax_tuning",
        "seqlen",
        "nsamples",
        "batch_size",
        "amp",
        "scale_dtype",
        "low_gpu_mem_usage",
    ),
    *(
        "gradient_accumulate_steps",
        "dataset",
        "to_quant_block_names",
        "enable_norm_bias_tuning",
        "tokenizer",
        "backend",
    ),
    *(HEAD, "enable_alg_ext", "seed", "static_kv_dtype", "enable_torch_compile", "model_free"),
)


def _special(extra: Fields, key: str, numbers: DeclaredNumbers) -> DeclaredNumbers | None:
    inner = extra.inner(key)
    if inner is None:
        return numbers
    bits = inner.number("bits", numbers.bits)
    inner.choose("data_type", ("int", "float", "bfloat16", "float16", "fp"), "int")
    block = (1, max(inner.number("group_size", numbers.block[1] if numbers.block else 128), 0))
    symmetric = inner.flag("sym", numbers.symmetric)
    inner.skip("act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic", "super_bits")
    inner.skip("super_group_size", "scale_dtype", "in_blocks", "fixed_by_user")
    inner.close()
    if bits >= 16:
        return None
    if bits not in KNOWN_BITS:
        raise extra.fail(key, f"says {bits} bits, known are {', '.join(map(str, KNOWN_BITS))}")
    return replace(numbers, bits=bits, block=block, symmetric=symmetric)


@dataclass(frozen=True)
class Gptq:
    """`qweight`, `qzeros`, `scales` and, in the first versions always, `g_idx`."""

    id: str = "gptq"
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    methods: tuple[QuantMethod, ...] = (GptqMethod(), AutoRoundMethod())

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        if "qweight" not in group.specs or (declared and declared.packing not in {"gptq", "gptq_v2"}):
            return None
        if declared is None:
            return group.undeclared("GPTQ or AWQ codes", "qweight")
        if missing := group.missing("qzeros", "scales"):
            return missing
        assert declared.block
        qweight = group.specs["qweight"].shape
        if len(qweight) != 2 or qweight[0] * 32 % declared.bits:
            return group.reject(f"is {list(qweight)}, no words of {declared.bits}-bit codes", suffix="qweight")
        k, n = qweight[0] * 32 // declared.bits, qweight[1]
        size = declared.block[1] or k
        groups = -(-k // size)
        has_order = "g_idx" in group.specs
        shapes = {
            "qweight": (torch.int32, (packed_words(k, declared.bits), n)),
            "qzeros": (torch.int32, (groups, packed_words(n, declared.bits))),
            "scales": ((torch.float16, torch.bfloat16, torch.float32), (groups, n)),
            **({"g_idx": ((torch.int32, torch.int64), (k,))} if has_order else {}),
        }
        if wrong := group.mismatch(shapes, f"{declared.bits} bits in groups of {declared.block[1] or k}"):
            return wrong
        if declared.by_activation and not has_order:
            return group.reject(
                "was quantized in the order of activations (desc_act), but has no `g_idx`", suffix="qweight"
            )
        names = tuple(group.names[suffix] for suffix in ("qweight", "scales", "qzeros", *(["g_idx"] * has_order)))
        decoder = GptqDecoder(
            declared.bits,
            k,
            declared.block[1],
            1 << (declared.bits - 1),
            offset=1 if declared.packing == "gptq" else 0,
            has_order=has_order,
            n=n,
        )
        kind = "GPTQ, in the order of activations," if declared.by_activation else "GPTQ"
        return StoredWeight(
            group.module,
            names,
            group.others("qweight", "scales", "qzeros", "g_idx"),
            (n, k),
            f"int{declared.bits} {kind} group {declared.block[1] or 'K'}",
            decoder,
            int4_format(declared.bits, declared.block[1], (n, k), declared.by_activation),
            layout=layout_id(
                f"{declared.packing.replace('_', '-')}-int4{'-order' * has_order}", group.specs["scales"].dtype
            ),
            requantized=True,
        )


GPTQ = Gptq()
