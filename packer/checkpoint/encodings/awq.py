"""AWQ of kind gemm: int4 codes packed along N, in an order of nibbles of its own, with zero points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, QuantMethod, everywhere
from ..encoding import StoredWeight, TensorGroup
from .affine import AffineDecoder, int4_format, layout_id
from .bits import awq_columns


@dataclass(frozen=True)
class AwqDecoder(AffineDecoder):
    """Tensors qweight int32 [K, N / 8], scales [G, N], qzeros int32 [G, N / 8].

    Attributes:
        n: Rows of the matrix.
    """

    n: int = 0

    def unpack(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.unpack`."""
        return awq_columns(tensors[0], rows).T

    def scales(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.scales`."""
        return tensors[1][:, rows].T

    def zeros(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor | None:
        """See `AffineDecoder.zeros`."""
        return awq_columns(tensors[2], rows).T if len(tensors) > 2 else None

    def height(self, tensors: Sequence[torch.Tensor]) -> int:
        """See `AffineDecoder.height`."""
        return self.n


@dataclass(frozen=True)
class AwqMethod:
    """`quant_method: awq`."""

    id: str = "awq"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        bits = fields.choose("w_bit", (4,), fields.choose("bits", (4,), 4))
        group = fields.number("q_group_size", fields.number("group_size", 128))
        version = fields.take("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise fields.fail("version", f"is {version!r}; of AWQ, only `gemm` is read")
        fields.choose("format", ("gemm",))
        fields.choose("zero_point", (True,), True)
        skipped = fields.names("modules_to_not_convert")
        fields.skip("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "sym", "desc_act")
        fields.close()
        return everywhere(DeclaredNumbers("int", bits, (1, max(group, 0)), False, packing="gemm"), skipped)


@dataclass(frozen=True)
class Awq:
    """`qweight`, `qzeros` and `scales`."""

    id: str = "awq"
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales")
    methods: tuple[QuantMethod, ...] = (AwqMethod(),)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        if "qweight" not in group.specs or declared is None or declared.packing != "gemm":
            return None
        if "g_idx" in group.specs:
            return group.reject("has a `g_idx`, which AWQ does not know", suffix="qweight")
        if declared.bits != 4:
            return group.reject(f"has {declared.bits} bits, AWQ has 4", suffix="qweight")
        if missing := group.missing("scales", "qzeros"):
            return missing
        assert declared.block
        if len(group.specs["qweight"].shape) != 2:
            return group.reject(f"is {list(group.specs['qweight'].shape)}, no matrix of words", suffix="qweight")
        k, words = group.specs["qweight"].shape
        n, size = words * 8, declared.block[1] or k
        groups = -(-k // size)
        shapes = {
            "qweight": (torch.int32, (k, words)),
            "qzeros": (torch.int32, (groups, words)),
            "scales": ((torch.float16, torch.bfloat16, torch.float32), (groups, n)),
        }
        if k % size:
            return group.reject(f"has {k} columns, no whole groups of {size}", suffix="qweight")
        if wrong := group.mismatch(shapes, f"4 bits in groups of {size}"):
            return wrong
        names = tuple(group.names[suffix] for suffix in ("qweight", "scales", "qzeros"))
        decoder = AwqDecoder(4, k, declared.block[1], 8, n=n)
        return StoredWeight(
            group.module,
            names,
            group.others("qweight", "scales", "qzeros"),
            (n, k),
            f"int4 AWQ group {declared.block[1] or 'K'}",
            decoder,
            int4_format(4, declared.block[1], (n, k), False),
            layout=layout_id("awq-int4", group.specs["scales"].dtype),
            requantized=True,
        )


AWQ = Awq()
