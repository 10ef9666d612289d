"""What a packed file says about itself and its modules: enough to run them, and to turn them back into their source."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..errors import CheckpointError, LayoutError, TilewrightError, quoted
from ..formats import FORMATS, WeightFormat
from ..layouts import LAYOUTS
from ..layouts.base import Layout
from ..layouts.cpu_blocks import row_unit
from ..rotation import Rotation
from ..tensors import Reject, TensorSpec
from .safetensors_file import DTYPE_NAMES, DTYPES, Header
from .source_stack import SourceStack, whole_number

PACKED_VERSION = "1"
MOST_RANKS = 1 << 16
QUANT_METHOD = "tilewright"
INPUT_SCALE = "input_scale"  # last part of the name of a static activation scale


@dataclass(frozen=True)
class RankSharding:
    """Which share of a model lies in a directory.

    Attributes:
        tp: Rank and number of ranks that every matrix is cut for.
        ep: Rank and number of ranks that the experts are dealt to.
    """

    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)

    def to_json(self) -> str:
        """The value of `tilewright.cut`."""
        return json.dumps({"tp": list(self.tp), "ep": list(self.ep)})

    @staticmethod
    def from_json(text: str) -> RankSharding:
        """The inverse of `to_json`.

        Raises:
            LayoutError: It is no such value.
        """
        try:
            fields = json.loads(text)
            (tp_rank, tp_size), (ep_rank, ep_size) = fields["tp"], fields["ep"]
            for rank, size in ((tp_rank, tp_size), (ep_rank, ep_size)):
                if not 0 <= whole_number(rank) < whole_number(size) <= MOST_RANKS:
                    raise ValueError(f"rank {rank} of {size}")
            return RankSharding((tp_rank, tp_size), (ep_rank, ep_size))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"`tilewright.cut` is {quoted(text)}, which describes no cut") from error

    @property
    def ranks(self) -> int:
        """How many directories make the whole model."""
        return max(self.tp[1], self.ep[1])

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.tp[0] if self.tp[1] > 1 else self.ep[0]


def rank_directory(rank: int, ranks: int) -> str:
    """Name of the directory of one rank below the output directory."""
    return f"rank-{rank}-of-{ranks}"


@dataclass(frozen=True)
class Gating:
    """What experts compute between their two products.

    Attributes:
        activation: One of `ops.experts.ACTIVATIONS`.
        alpha: Slope of `clamped_swiglu`.
        limit: Bound of `clamped_swiglu`.
    """

    activation: str
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class ModuleSpec:
    """One packed module: a weight [N, K] or a stack of experts [E, N, K], with or without a bias.

    Linears that are packed as one (`model_names.JOINED`) are a weight like any other, whose rows are theirs one after
    the other. As each has whole blocks of rows, its tensors are slices of the joined ones along the first dimension.

    Attributes:
        layout: How its tensors are arranged.
        format: What its numbers mean.
        shape: Logical shape, without padding.
        parts: Equal parts of the rows, each padded and scaled on its own (gate and up: 2).
        sources: Modules of the source whose rows it holds, in row order; `{}` stands for the number of an expert,
            counted from `first_expert`.
        source_layout: Layout of the weight in the source.
        bias_dtype: dtype of the bias in the source, or None without a bias. Packed biases are fp32.
        first_expert: Number that the first expert of the stack has in the source.
        whole: Logical shape of the uncut module; empty if this is all of it.
        joined: Rows of each source, if they are Linears that were joined; else empty, and sources are equal parts.
        rotation: What its input is multiplied by before it is quantized; None: nothing.
        gating: Of the upper stack of experts: what follows it; None where the file does not say.
        leading: Rows of each part and columns, all zero, that are stored before a share that begins inside a block of
            scales: what is stored begins where the block does, so that the share keeps the scales of the whole.
        stack: Where the source held its experts in one tensor that comes back when the directory is unpacked; or None.
    """

    layout: Layout
    format: WeightFormat
    shape: tuple[int, ...]
    parts: int = 1
    sources: tuple[str, ...] = ()
    source_layout: str = ""
    bias_dtype: torch.dtype | None = None
    first_expert: int = 0
    whole: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    rotation: Rotation | None = None
    gating: Gating | None = None
    leading: tuple[int, int] = (0, 0)
    stack: SourceStack | None = None

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of what is stored: the logical one and its leading zeros."""
        *lead, n, k = self.shape
        return (*lead, n + self.parts * self.leading[0], k + self.leading[1])

    @property
    def source_rows(self) -> tuple[int, ...]:
        """Rows of each source."""
        return self.joined or (self.shape[-2] // self.parts,) * self.parts

    @property
    def numbers(self) -> range:
        """Numbers that the experts of the stack have in the source."""
        return range(self.first_expert, self.first_expert + self.shape[0])

    @property
    def needs_all_reduce(self) -> bool:
        """Whether results have to be added up over all ranks: this one has some of the columns or of the experts."""
        return bool(self.whole) and (self.whole[-1], self.whole[:-2]) != (self.shape[-1], self.shape[:-2])

    def linears(self) -> dict[str, tuple[ModuleSpec, slice]]:
        """The Linears that were joined: name -> what it is on its own, and its rows; empty if none were."""
        if not self.joined:
            return {}
        found: dict[str, tuple[ModuleSpec, slice]] = {}
        start = 0
        for name, n in zip(self.sources, self.joined, strict=True):
            whole = (n * self.whole[0] // self.shape[0], self.whole[1]) if self.whole else ()
            spec = replace(self, shape=(n, self.shape[1]), sources=(name,), whole=whole, joined=())
            found[name] = spec, slice(start, start + n)
            start += n
        return found

    def with_rows(self, rows: slice) -> ModuleSpec:
        """What some of the rows of a weight [N, K] are on their own."""
        sized = (rows.stop - rows.start, self.shape[1])
        return replace(self, shape=sized, sources=(), source_layout="", whole=self.whole or self.shape, joined=())

    def take(self, tensors: Mapping[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
        """Views of some rows of a weight [N, K] in each of its tensors.

        Args:
            tensors: By suffix.
            rows: Beginning with a block (a multiple of `row_unit`) and ending with a block or with the weight.
        """
        before = self.with_rows(slice(0, rows.start)).tensors()
        taken = self.with_rows(rows).tensors()
        return {
            suffix: tensor.narrow(0, before[suffix].shape[0], taken[suffix].shape[0])
            for suffix, tensor in tensors.items()
        }

    def tensors(self) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of each of its tensors, `bias` fp32 [.., N] included."""
        specs = dict(self.layout.specs(self.format, self.stored, self.parts))
        if self.bias_dtype is not None:
            specs["bias"] = TensorSpec(torch.float32, self.stored[:-1])
        return specs

    def _why_not_sources(self) -> Reject | None:
        """Why it cannot have been made of the modules that it names, or None if it can."""
        rows, names, whole = self.source_rows, self.sources, self.whole or self.shape
        if len(whole) != len(self.shape) or any(size < mine for size, mine in zip(whole, self.shape, strict=True)):
            return Reject("whole", f"{list(whole)} has no share of {list(self.shape)}")
        if names and (len(names) != len(rows) or len(set(names)) != len(names)):
            return Reject("sources", f"{', '.join(names)} are not {len(rows)} modules")
        last = self.first_expert + self.shape[0] if len(self.shape) > 2 else self.first_expert
        if last > (whole[0] if len(self.shape) > 2 else 0):
            return Reject("first_expert", f"{self.first_expert} of {list(self.shape)} is beyond {list(whole)}")
        if any(size % mine for size, mine in zip(whole, self.shape, strict=True)):
            return Reject("whole", f"{list(whole)} is no multiple of the share {list(self.shape)}")
        number = "{}" if len(self.shape) > 2 else ""
        if any(number not in name or {"{", "}"} & set(name.replace(number, "", 1)) for name in names):
            return Reject("sources", f"{', '.join(names)}: `{{}}` must stand once in those of a stack, nowhere else")
        return None

    def _why_not_joined(self) -> Reject | None:
        """Why its rows cannot be those of the Linears that it names, or None if they can."""
        unit = row_unit(self.format)
        if not self.joined:
            return None
        if self.parts > 1 or not 1 < len(self.joined) == len(self.sources) or (sum(self.joined),) != self.shape[:-1]:
            return Reject("joined", f"{list(self.joined)} are not the rows of its {len(self.sources)} sources")
        if any(self.leading):
            return Reject("joined", "shares with leading zeros are not joined")
        if any(rows < 1 or rows % unit for rows in self.joined):
            return Reject("joined", f"{list(self.joined)} are no multiples of {unit}")
        return None

    def _why_not_leading(self) -> Reject | None:
        """Why such zeros cannot stand before its share, or None if they can."""
        edge = max(self.format.block_n, self.format.block_k)
        if any(self.leading) and (not self.whole or max(self.leading) >= edge):
            return Reject("leading", f"{list(self.leading)}: only a share has zeros before it, fewer than {edge}")
        return None

    def why_not_in(self, sharding: RankSharding) -> str | None:
        """Why it cannot lie in a directory of this cut, or None if it can."""
        if not self.whole:
            return None
        axes = [whole // mine for whole, mine in zip(self.whole, self.shape, strict=True)]
        dealt = len(axes) == 3 and axes[0] > 1
        if dealt and (axes[0] != sharding.ep[1] or self.first_expert != sharding.ep[0] * self.shape[0]):
            mine = f"experts {self.first_expert} to {self.first_expert + self.shape[0] - 1} of {self.whole[0]}"
            return f"{mine} are not the share of rank {sharding.ep[0]} of {sharding.ep[1]}"
        inner = {
            1,
            sharding.tp[1],
            sharding.tp[1] // sharding.ep[1],
        }  # where experts are dealt out first, their matrices are cut less
        if any(axis not in inner for axis in axes[-2:]):
            return f"{list(self.shape)} of {list(self.whole)} is not the share of one rank of {sharding.tp[1]}"
        return None

    def to_json(self) -> dict[str, Any]:
        """The fields that `tilewright.modules` holds for it."""
        fields: dict[str, Any] = {
            "layout": self.layout.id,
            "version": self.layout.version,
            "format": self.format.id,
            "shape": list(self.shape),
            "parts": self.parts,
            "sources": list(self.sources),
            "source_layout": self.source_layout,
        }
        if self.bias_dtype is not None:
            fields["bias"] = DTYPE_NAMES[self.bias_dtype]
        if self.first_expert:
            fields["first_expert"] = self.first_expert
        if self.whole:
            fields["whole"] = list(self.whole)
        if self.joined:
            fields["joined"] = list(self.joined)
        if self.rotation:
            fields["rotation"] = self.rotation.to_json()
        if self.gating:
            fields |= asdict(self.gating)
        if any(self.leading):
            fields["leading"] = list(self.leading)
        if self.stack:
            fields["stack"] = self.stack.to_json()
        return fields

    @staticmethod
    def from_json(module: str, fields: Mapping[str, Any]) -> ModuleSpec:
        """The inverse of `to_json`.

        Raises:
            LayoutError: A field is missing or unknown here, or the layout has another version.
        """
        try:
            layout = LAYOUTS[fields["layout"]]
            if fields["version"] != layout.version:
                found = str(fields["version"])[:50]
                raise LayoutError(
                    f"layout `{layout.id}` has version {layout.version} here, the file has {found}",
                    hint="pack the checkpoint again with this release",
                )
            spec = ModuleSpec(
                layout,
                FORMATS[fields["format"]],
                tuple(whole_number(size) for size in fields["shape"]),
                whole_number(fields["parts"]),
                tuple(str(name) for name in fields.get("sources", ())),
                str(fields.get("source_layout", "")),
                DTYPES[fields["bias"]] if "bias" in fields else None,
                whole_number(fields.get("first_expert", 0)),
                tuple(whole_number(size) for size in fields.get("whole", ())),
                tuple(whole_number(rows) for rows in fields.get("joined", ())),
                Rotation.from_json(fields["rotation"]) if "rotation" in fields else None,
                _gating(fields),
                _leading(fields),
                SourceStack.from_json(fields["stack"]) if "stack" in fields else None,
            )
            if len(spec.shape) not in {2, 3} or spec.parts < 1 or spec.shape[-2] % spec.parts or min(spec.shape) < 1:
                raise ValueError(f"{spec.parts} parts of shape {list(spec.shape)}")
            reject = layout.accepts(spec.format, spec.stored, spec.parts) or spec._why_not_joined()
            reject = reject or spec._why_not_sources() or spec._why_not_leading()
            if spec.stack:
                reject = reject or spec.stack.why_not((spec.whole or spec.shape)[-2])
            if spec.rotation:
                reject = reject or spec.rotation.why_not(spec.format, spec.shape[-1])
        except TilewrightError as error:
            raise LayoutError(f"{module}: {error.message}", hint=error.hint) from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LayoutError(f"{module}: broken description of a packed module: {repr(error)[:200]}") from error
        if reject:
            raise LayoutError(f"{module}: {reject}")
        return spec


def _gating(fields: Mapping[str, Any]) -> Gating | None:
    """What a file says that experts compute; files of release 0.1 say nothing."""
    if "activation" not in fields:
        return None
    gating = Gating(str(fields["activation"]), float(fields.get("alpha", 1.702)), float(fields.get("limit", 7.0)))
    if not all(math.isfinite(value) and value > 0 for value in (gating.alpha, gating.limit)):
        raise ValueError(f"alpha {gating.alpha}, limit {gating.limit}")
    return gating


def _leading(fields: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = fields.get("leading", (0, 0))
    return whole_number(rows), whole_number(columns)


def described_modules(header: Header) -> dict[str, Any]:
    """What a file says about its packed modules: name -> fields for `ModuleSpec.from_json`; empty if nothing.

    Raises:
        CheckpointError: It is no JSON object.
    """
    text = header.metadata.get("tilewright.modules", "{}")
    try:
        modules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{header.path}: `tilewright.modules` is not valid JSON: {error}") from error
    if not isinstance(modules, dict):
        raise CheckpointError(f"{header.path}: `tilewright.modules` is {quoted(text)}, a JSON object is expected")
    return modules
