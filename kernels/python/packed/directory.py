"""The packed directory: opened by its headers, checked as a whole, run from the mapped files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..errors import CheckpointError, KernelUnavailableError, TilewrightError
from ..modules import PackedExperts, PackedLinear, PackedStack, build_experts, build_module, find_kernel
from ..modules.weight import check_activation_scales
from ..tensors import TensorSpec
from .manifest import MANIFEST_FILE, difference, read_manifest
from .module_spec import INPUT_SCALE, PACKED_VERSION, Gating, ModuleSpec, RankSharding, described_modules
from .records import read_object
from .reorder import reorder, reordered_spec
from .safetensors_file import Header, MappedFile, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
UNCALIBRATED = 1.0
UPPER, LOWER = "w13", "w2"  # the stacks of routed experts
RUN_HINT = "make the directory again with `pack-for-cpu` or `pack-for-gpu`"


PackedModule = PackedLinear | PackedStack | PackedExperts


class PackedCheckpoint(Mapping[str, PackedModule]):
    """An opened packed directory: its modules by name, made when they are asked for.

    Iteration gives each stored module once. Linears that were joined are found under the name of the joined module and
    each under its own (`packed["….qkv_proj"]`, `"….q_proj" in packed`), as views of the joined one's rows. The routed
    experts of a layer are found under the name that their two stacks share (`packed["….mlp.experts"]`), ready to run.

    Attributes:
        root: The directory.
        config: Its config.json.
        scheme: Scheme id, or `none` for plain 16-bit weights.
        sharding: Which share of the model this is.
        specs: Stored modules by name.
        joined: Linears that were joined: name -> the stored module that holds its rows.
        experts: Names of routed experts, each of which has two stacks, `<name>.w13` and `<name>.w2`.
        plain: All other tensors by name: source name, dtype and shape.
        device: Where the tensors are put; "cpu" means that they stay views of the mapped files.
        activation_scales: As `load_packed` was given it.
    """

    def __init__(self, root: Path, headers: list[Header], device: str, activation_scales: str = "token") -> None:
        self.root = root
        self.activation_scales = activation_scales
        self.config: dict[str, Any] = _read_json(root / "config.json")
        self.device = device
        first = headers[0].metadata
        self.scheme = first.get("tilewright.scheme", "none")
        self.sharding = RankSharding.from_json(first.get("tilewright.cut", ""))
        self._files = {name: header for header in headers for name in header.specs}
        self.specs = _read_specs(headers, self.sharding)
        stacks = {name.rpartition(".")[0] for name, spec in self.specs.items() if len(spec.shape) == 3}
        self.experts = {name for name in stacks if {f"{name}.{UPPER}", f"{name}.{LOWER}"} <= self.specs.keys()}
        self.joined = {part: name for name, spec in self.specs.items() for part in spec.linears()}
        owned = {f"{name}.{suffix}" for name, spec in self.specs.items() for suffix in spec.tensors()}
        self.plain: dict[str, TensorSpec] = {
            name: header.specs[name] for name, header in self._files.items() if name not in owned
        }
        self._maps: dict[Path, MappedFile] = {}
        self._modules: dict[str, PackedModule] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle gets: it maps the files anew."""
        return {**self.__dict__, "_maps": {}, "_modules": {}}

    def __getitem__(self, name: str) -> PackedModule:
        if name not in self._modules:
            make = self._part if name in self.joined else self._experts if name in self.experts else self._stored
            self._modules[name] = make(name)
        return self._modules[name]

    def weight(self, name: str) -> PackedLinear | PackedStack:
        """The packed Linear or stack of experts `name`, not the experts that two stacks make."""
        found = self[name]
        assert isinstance(found, PackedLinear | PackedStack), f"{name} is routed experts"
        return found

    def _experts(self, name: str) -> PackedExperts:
        gating = self.specs[f"{name}.{UPPER}"].gating
        if gating is None:
            raise KernelUnavailableError(
                f"{self.root}: `{name}`: the file does not say which activation its experts have",
                hint="pack it again with this release, or build `PackedExperts` from the two stacks and the activation",
            )
        return self.build_experts(name, gating)

    def build_experts(self, name: str, gating: Gating) -> PackedExperts:
        """The routed experts of one layer, with a gating that the caller knows."""
        first, second = self.input_scale(f"{name}.{UPPER}"), self.input_scale(f"{name}.{LOWER}")
        scales = None if first is None or second is None else (first, second)
        upper, lower = self.get(f"{name}.{UPPER}"), self.get(f"{name}.{LOWER}")
        if not isinstance(upper, PackedStack) or not isinstance(lower, PackedStack):
            raise CheckpointError(f"{self.root}: `{name}`: w13 and w2 are not both stacks of experts", hint=RUN_HINT)
        return build_experts(name, upper, lower, gating, scales)

    def _part(self, name: str) -> PackedModule:
        whole = self.weight(self.joined[name])
        spec, rows = whole.spec.linears()[name]
        return build_module(name, spec, whole.spec.take(dict(whole.named_buffers()), rows), self.activation_scales)

    def _stored(self, name: str) -> PackedModule:
        spec = self.specs[name]
        tensors = {suffix: self.tensor(f"{name}.{suffix}") for suffix in spec.tensors()}
        runnable = self._runnable(name)
        if runnable != spec:
            bias = {suffix: tensor for suffix, tensor in tensors.items() if suffix == "bias"}
            tensors = reorder(spec, tensors) | bias
        return build_module(name, runnable, tensors, self.activation_scales)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return name in self.specs or name in self.joined or name in self.experts

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`: on a CPU a view of the mapped file."""
        if name not in self._files:
            raise CheckpointError(f"{self.root}: there is no tensor `{name}`")
        header = self._files[name]
        if header.path not in self._maps:
            self._maps[header.path] = MappedFile(header)
        tensor = self._maps[header.path].tensor(name)
        return tensor if self.device == "cpu" else tensor.to(self.device)

    def input_scale(self, name: str) -> torch.Tensor | None:
        """The static activation scale of a stack of experts: fp32 [1]; None if it was not calibrated.

        Engines start with 1 and so do files that nobody calibrated: activations are then scaled as they come.
        """
        full = f"{name}.{INPUT_SCALE}"
        if full not in self.plain:
            return None
        scale = self.tensor(full)
        return None if float(scale) == UNCALIBRATED else scale

    def _runnable(self, name: str) -> ModuleSpec:
        """What a module is on the device: experts packed for an engine's GPU kernel are reordered for the bundled."""
        spec = self.specs[name]
        return spec if torch.device(self.device).type == "cpu" else reordered_spec(name, spec)

    def forget(self, prefix: str) -> None:
        """Give back the memory into which tensors whose names begin with `prefix` were mapped.

        They stay usable: their pages are read from the file again when they are needed.
        """
        for name, header in self._files.items():
            if name.startswith(prefix) and header.path in self._maps:
                entry = header.entries[name]
                self._maps[header.path].forget(entry.start, entry.spec.nbytes)

    def problems(self) -> list[str]:
        """Everything that keeps this directory from being run here."""
        found = []
        for name, spec in self.specs.items():
            try:
                find_kernel(name, self._runnable(name), torch.device(self.device).type)
            except TilewrightError as error:
                found.append(error.message)
            for suffix, expected in spec.tensors().items():
                full = f"{name}.{suffix}"
                stored = self._files[full].specs[full] if full in self._files else None
                if stored is None:
                    found.append(f"`{full}` is missing")
                elif stored != expected:
                    found.append(
                        f"`{full}` is {stored.dtype} {list(stored.shape)}, layout `{spec.layout.id}` demands "
                        f"{expected.dtype} {list(expected.shape)}"
                    )
        return found


def load_packed(
    path: str | Path,
    rank: int | None = None,
    device: str = "cpu",
    verify_checksums: bool = False,
    activation_scales: str = "token",
) -> PackedCheckpoint:
    """Open a packed directory; only headers are read, and no weight is copied on a CPU.

    Args:
        path: The directory that `pack-for-cpu` or `pack-for-gpu` wrote.
        rank: Which share of a model that was cut for several ranks; None for an uncut one.
        device: Where to run; "cpu" keeps the weights in the mapped files.
        verify_checksums: Also compare every file with the checksum in the manifest, which reads all of it.
        activation_scales: For weights that int8 activations multiply: a scale for each "token", or for each "group" of
            64 columns of a token, which keeps outliers to themselves (docs/runtime.md has costs and accuracy).

    Raises:
        CheckpointError: The directory is not a complete packed one, or not for this rank or device; one message lists
            everything that is wrong.
    """
    root = _find_rank(Path(path), rank)
    manifest = root / MANIFEST_FILE
    if not manifest.is_file():
        raise CheckpointError(f"{root}: no {MANIFEST_FILE}, so this is no finished packed directory", hint=RUN_HINT)
    _check_device(device)
    check_activation_scales(activation_scales)
    headers = _read_headers(root)
    _check_files(root, headers, verify_checksums)
    packed = PackedCheckpoint(root, headers, device, activation_scales)
    if rank is None and packed.sharding.ranks > 1:
        share = f"rank {packed.sharding.rank} of {packed.sharding.ranks}"
        reason = f"holds the share of {share}, whose results are only a part"
        raise CheckpointError(f"{root}: {reason}", hint=f"say that this is meant: rank={packed.sharding.rank}")
    if rank is not None and packed.sharding.rank != rank:
        raise CheckpointError(f"{root}: holds rank {packed.sharding.rank} of {packed.sharding.ranks}, not rank {rank}")
    if problems := packed.problems():
        raise CheckpointError(f"{root}: cannot be run:\n  " + "\n  ".join(problems), hint=RUN_HINT)
    return packed


def _check_device(device: str) -> None:
    try:
        torch.device(device)
    except RuntimeError as error:
        raise KernelUnavailableError(f"device `{device}` is none that torch knows", hint="`cpu` or `cuda`") from error


def _find_rank(path: Path, rank: int | None) -> Path:
    if not path.is_dir():
        reason = "not a directory" if path.exists() else "no such directory"
        raise CheckpointError(f"{path}: {reason}", hint="name what `pack-for-cpu` or `pack-for-gpu` wrote")
    cuts = sorted(path.glob("rank-*-of-*/"))
    if not cuts:
        return path
    found = [cut for cut in cuts if rank is not None and cut.name.startswith(f"rank-{rank}-of-")]
    if len(found) != 1:
        names = ", ".join(cut.name for cut in cuts)
        if rank is None:
            raise CheckpointError(f"{path}: is cut for several ranks: {names}", hint="say which one: rank=0 and so on")
        raise CheckpointError(f"{path}: rank {rank} is not there, there are {names}", hint="pass rank=0 and so on")
    return found[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, constants=True, hint=RUN_HINT)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", hint=RUN_HINT) from error


def _read_headers(root: Path) -> list[Header]:
    """Headers of all shards, each with the metadata of this specification."""
    names = [SINGLE_FILE]
    if (root / INDEX_FILE).is_file():
        weight_map = _read_json(root / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{root / INDEX_FILE}: no `weight_map` from tensor names to files", hint=RUN_HINT)
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if PurePosixPath(name).name != name:
            raise CheckpointError(f"{root / INDEX_FILE}: names `{name}`, which is no plain file name")
    if missing := [name for name in names if not (root / name).is_file()]:
        raise CheckpointError(f"{root}: missing shards: {', '.join(missing)}", hint=RUN_HINT)
    headers = [read_header(root / name) for name in names]
    for header in headers:
        version = header.metadata.get("tilewright.packed")
        if version is None:
            reason = "not a packed file: its header has no `tilewright.packed`"
            raise CheckpointError(f"{header.path}: {reason}", hint=RUN_HINT)
        if version != PACKED_VERSION:
            reason = f"packed by version {version} of the format, this release reads {PACKED_VERSION}"
            raise CheckpointError(f"{header.path}: {reason}", hint=RUN_HINT)
    if len({header.metadata.get("tilewright.cut") for header in headers}) > 1:
        raise CheckpointError(f"{root}: its shards belong to different cuts (`tilewright.cut`)", hint=RUN_HINT)
    return headers


def _why_not_beside(name: str, specs: Mapping[str, ModuleSpec]) -> str | None:
    """Why an upper stack of experts does not go with the lower one of its layer, or None if it does."""
    container, _, kind = name.rpartition(".")
    upper, lower = specs[name], specs.get(f"{container}.{LOWER}")
    if kind != UPPER or lower is None or len(upper.shape) != 3 or len(lower.shape) != 3:
        return None
    (e, n, k), (others, hidden, inner) = upper.shape, lower.shape
    if (e, n, k, upper.first_expert) != (others, upper.parts * inner, hidden, lower.first_expert):
        experts = f"from expert {upper.first_expert} on, {LOWER} is {list(lower.shape)} from {lower.first_expert} on"
        return f"is {list(upper.shape)} {experts}: no experts of one layer"
    return None


def _read_specs(headers: list[Header], sharding: RankSharding) -> dict[str, ModuleSpec]:
    specs: dict[str, ModuleSpec] = {}
    problems = []
    for header in headers:
        for name, fields in described_modules(header).items():
            try:
                specs[name] = ModuleSpec.from_json(name, fields)
            except TilewrightError as error:
                problems.append(str(error))
    taken = set(specs)
    for name, spec in specs.items():
        problems += [f"{name}: `{part}`, a part of it, is a module already" for part in spec.linears() if part in taken]
        problems += [
            f"{name}: {reason}" for reason in (spec.why_not_in(sharding), _why_not_beside(name, specs)) if reason
        ]
        taken |= spec.linears().keys()
    if not specs and not problems:
        problems.append("no shard describes a packed module")
    if problems:
        raise CheckpointError(f"{headers[0].path.parent}: cannot be run:\n  " + "\n  ".join(problems), hint=RUN_HINT)
    return specs


def _check_files(root: Path, headers: list[Header], checksums: bool) -> None:
    """Compare every shard with the manifest: its size, and if asked for its checksum."""
    manifest = read_manifest(root)
    if manifest is None:
        raise CheckpointError(f"{root / MANIFEST_FILE}: was not written by Tilewright", hint=RUN_HINT)
    problems = []
    for header in headers:
        name = header.path.name
        stated = manifest.files.get(name)
        if stated is None:
            problems.append(f"{name} is not in {MANIFEST_FILE}")
        elif reason := difference(header.path, stated, checksum=checksums):
            problems.append(f"{name} {reason}")
    if problems:
        raise CheckpointError(f"{root}: damaged:\n  " + "\n  ".join(problems), hint=RUN_HINT)
