"""What a directory is: scheme, layouts, sizes, experts, and what is left in 16 bits and why. Headers only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tilewright.kernels.packed.manifest import read_manifest
from tilewright.kernels.packed.module_spec import ModuleSpec, RankSharding
from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES

from .checkpoint import quantization_config
from .checkpoint.encoding import ACTIVATION_SUFFIXES
from .checkpoint.encodings.plain import NAMES
from .checkpoint.files import Checkpoint
from .checkpoint.packed import packed_modules, stored_inventory
from .families import family_of
from .families.config import HIDDEN, LAYERS, announced_mtp, expert_count, is_tied, text_config
from .families.layers import mtp_tensors
from .families.roles import KEPT, Role
from .records.ledger import read_ledger

Kind = Literal["plain", "quantized", "packed"]
METHODS = {"fp8": "block-fp8", "w8a8_int8": "int8", "w4afp8": "w4afp8"}  # quant_method -> the scheme that it spells


@dataclass(frozen=True)
class Item:
    """One weight, packed module or loose tensor of a directory.

    Attributes:
        name: Module, or tensor for what is no matrix.
        role: What it is in the model.
        encoding: How its numbers are stored.
        layout: Packed layout, empty if not packed.
        parameters: Logical elements.
        nbytes: Bytes on disk with scales, zero points and padding.
        quantized: Whether it takes fewer than 16 bits.
        reason: Why it is not quantized, empty if it is.
    """

    name: str
    role: Role
    encoding: str
    layout: str
    parameters: int
    nbytes: int
    quantized: bool
    reason: str = ""


@dataclass(frozen=True)
class ItemGroup:
    """Items of a directory that are alike.

    Attributes:
        role: What they are.
        encoding: How their numbers are stored.
        layout: Packed layout, empty if not packed.
        reason: Why they are not quantized, empty if they are.
        items: How many there are.
        parameters: Logical elements of all.
        nbytes: Bytes of all.
        examples: The first name.
    """

    role: Role
    encoding: str
    layout: str
    reason: str
    items: int
    parameters: int
    nbytes: int
    examples: str

    @property
    def bits(self) -> float:
        """Bits per logical element, scales and padding included."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class Inspection:
    """What a directory is.

    Attributes:
        path: The directory or file.
        kind: Whether it is plain, quantized or packed.
        scheme: Scheme, or quantization method for what others made; "none" if plain.
        model: Facts about the model by name.
        files: Number of safetensors files.
        parameters: Logical elements of all tensors.
        nbytes: Bytes of all tensors.
        bits: Bits per parameter, everything included.
        cut: Ranks of a packed directory that holds a share of a model.
        made_by: Version of Tilewright that wrote it, empty if another tool did.
        shares: What it holds, quantized things first, large before small.
        items: Everything that it holds.
        notes: What is worth telling.
    """

    path: str
    kind: Kind
    scheme: str
    model: dict[str, Any]
    files: int
    parameters: int
    nbytes: int
    bits: float
    cut: dict[str, Any]
    made_by: str
    shares: tuple[ItemGroup, ...]
    items: tuple[Item, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        document = asdict(self)
        for share, fields in zip(self.shares, document["shares"], strict=True):
            fields["bits"] = share.bits
        return document


def inspect(checkpoint: Checkpoint, path: str) -> Inspection:
    """Describe an opened checkpoint.

    Raises:
        CheckpointError: It holds weights that cannot be read; lists them.
    """
    modules = packed_modules(checkpoint)
    reasons = _reasons(checkpoint)
    items = (*_packed_items(checkpoint, modules), *_stored_items(checkpoint, reasons))
    block = quantization_config(checkpoint.config)
    kind: Kind = "packed" if modules else "quantized" if any(item.quantized for item in items) else "plain"
    parameters, nbytes = sum(item.parameters for item in items), sum(item.nbytes for item in items)
    metadata = next(iter(checkpoint.headers.values())).metadata if checkpoint.headers else {}
    manifest = read_manifest(checkpoint.root)
    return Inspection(
        path=path,
        kind=kind,
        scheme=_scheme(block, metadata, manifest.options if manifest else {}),
        model=_model(checkpoint, items),
        files=len(checkpoint.headers),
        parameters=parameters,
        nbytes=nbytes,
        bits=8 * nbytes / parameters if parameters else 0.0,
        cut=asdict(RankSharding.from_json(metadata["tilewright.cut"])) if "tilewright.cut" in metadata else {},
        made_by=manifest.tool if manifest else "",
        shares=_shares(items),
        items=items,
        notes=(*checkpoint.notes, *_notes(checkpoint), *_joined(modules)),
    )


def _packed_items(checkpoint: Checkpoint, modules: Mapping[str, ModuleSpec]) -> Iterator[Item]:
    family = family_of(checkpoint.config)
    for name, spec in modules.items():
        role: Role = "expert" if len(spec.shape) == 3 else family.role(name)
        nbytes = sum(tensor.nbytes for tensor in spec.tensors().values())
        reason = "" if spec.format.has_scales else KEPT.get(role, "16 bits in its source")
        yield Item(
            name, role, spec.format.id, spec.layout.id, math.prod(spec.shape), nbytes, spec.format.has_scales, reason
        )


def _joined(modules: Mapping[str, ModuleSpec]) -> Iterator[str]:
    counts = Counter((name.rpartition(".")[2], len(spec.joined)) for name, spec in modules.items() if spec.joined)
    for (name, parts), count in counts.items():
        yield f"{name}: {parts} Linears joined, {count} times"


def _stored_items(checkpoint: Checkpoint, reasons: Mapping[str, str]) -> Iterator[Item]:
    family = family_of(checkpoint.config)
    inventory = stored_inventory(checkpoint)
    for weight in inventory.weights:
        module = family.experts.canonical(weight.module)
        role: Role = "expert" if family.experts.find_stack(module) else family.role(module)
        nbytes = sum(checkpoint.spec(name).nbytes for name in (*weight.tensors, *weight.companions))
        reason = "" if weight.quantized else reasons.get(weight.tensors[0], KEPT.get(role, ""))
        encoding = weight.stored_format if weight.quantized and weight.stored_format else weight.encoding
        yield Item(module, role, encoding, "", math.prod(weight.shape), nbytes, weight.quantized, reason)
    for name in inventory.loose:
        yield _loose(checkpoint, name, reasons)


def _loose(checkpoint: Checkpoint, name: str, reasons: Mapping[str, str]) -> Item:
    spec = checkpoint.spec(name)
    family = family_of(checkpoint.config)
    role: Role = family.role(family.experts.canonical(name).removesuffix(".weight"))
    if name.rpartition(".")[2] in ACTIVATION_SUFFIXES:
        role, reasons = "small", {name: "scale of activations"}
    encoding = NAMES.get(spec.dtype, DTYPE_NAMES[spec.dtype].lower())
    reason = reasons.get(name, KEPT.get(role, "no matrix"))
    return Item(name, role, encoding, "", math.prod(spec.shape), spec.nbytes, False, reason)


def _reasons(checkpoint: Checkpoint) -> dict[str, str]:
    """Output tensor -> why it was copied, as the ledger says."""
    ledger = read_ledger(checkpoint.root)
    entries = ledger.tensors.values() if ledger else ()
    return {name: entry.reason for entry in entries if entry.fate == "copied" for name in entry.outputs}


def _scheme(block: Mapping[str, Any], metadata: Mapping[str, str], options: Mapping[str, Any]) -> str:
    method = str(block.get("quant_method", "none"))
    if "tilewright.scheme" in metadata:
        return metadata["tilewright.scheme"]
    if "scheme" in options:
        return f"{options['scheme']} ({method})"
    return f"{METHODS[method]} ({method})" if method in METHODS else method


def _model(checkpoint: Checkpoint, items: tuple[Item, ...]) -> dict[str, Any]:
    """Facts that config.json states, and how many experts the files really hold."""
    config = text_config(checkpoint.config)
    names = (LAYERS, HIDDEN, "num_experts_per_tok", "moe_intermediate_size", "vocab_size")
    mtp = mtp_tensors(checkpoint.files, checkpoint.config)
    return {
        "model_type": config.get("model_type"),
        "architecture": family_of(checkpoint.config).id,
        **{name: config.get(name) for name in names},
        "experts": expert_count(config),
        "expert_matrices": sum(item.role == "expert" for item in items),
        "mtp_layers": announced_mtp(checkpoint.config),
        "mtp_tensors": len(mtp),
        "tied_head": bool(is_tied(checkpoint.config)),
    }


def _notes(checkpoint: Checkpoint) -> Iterator[str]:
    announced = announced_mtp(checkpoint.config)
    ledger = read_ledger(checkpoint.root)
    yield from ledger.notes if ledger else ()
    if announced and not ledger and not mtp_tensors(checkpoint.files, checkpoint.config):
        yield f"config.json announces {announced} MTP layer{'s' * (announced > 1)}, the files hold none"


def _shares(items: tuple[Item, ...]) -> tuple[ItemGroup, ...]:
    groups: dict[tuple[bool, Role, str, str, str], list[Item]] = {}
    for item in items:
        groups.setdefault((not item.quantized, item.role, item.encoding, item.layout, item.reason), []).append(item)
    shares = [
        ItemGroup(
            role,
            encoding,
            layout,
            reason,
            len(found),
            sum(item.parameters for item in found),
            sum(item.nbytes for item in found),
            found[0].name,
        )
        for (_, role, encoding, layout, reason), found in groups.items()
    ]
    return tuple(sorted(shares, key=lambda share: (bool(share.reason), -share.nbytes)))
