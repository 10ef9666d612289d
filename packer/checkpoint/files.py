"""Open a checkpoint: names, dtypes, shapes, config and side files, from headers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilewright.kernels.errors import CheckpointError, quoted
from tilewright.kernels.packed.manifest import MANIFEST_FILE
from tilewright.kernels.packed.records import read_object
from tilewright.kernels.packed.safetensors_file import Entry, FileStamp, Header, MappedFile
from tilewright.kernels.tensors import TensorSpec

from ..garbage import uncollected
from ..plan import Source
from .consumed import kept_files
from .declared import quantization_config
from .details import Details
from .gguf_file import SUFFIX, gguf_files, is_gguf, parts_of, read_gguf
from .hub import download, is_hub_id
from .shard_index import Shards, find_shards, read_headers
from .side_files import find_side_files

UNFINISHED = ".tilewright-partial"  # folder of an output that is being written: see `records.journal`


@dataclass(frozen=True)
class Checkpoint:
    """A checked source directory.

    Attributes:
        root: The directory.
        config: Its config.json; empty for a lone .safetensors file without one beside it.
        headers: Shard file name -> header.
        files: Tensor name -> shard file name, as the index says.
        side_files: Paths relative to `root` of everything that is neither weights nor their index.
        gone: Shard files that an earlier run with `--consume` has used up: only their headers are left.
        stamps: What every file that is no shard was when it was found: config, index, side files.
        notes: What was noticed and is no reason to refuse: a tensor stored twice, files that are left out.
    """

    root: Path
    config: dict[str, Any]
    headers: dict[str, Header]
    files: dict[str, str]
    side_files: tuple[Path, ...]
    gone: frozenset[str] = frozenset()
    stamps: dict[Path, FileStamp] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = ()
    _maps: dict[str, MappedFile] = field(default_factory=dict, repr=False, compare=False)
    described_by: set[str] = field(default_factory=set, repr=False, compare=False)  # names read through `details`

    def entry(self, name: str) -> Entry:
        """Where tensor `name` lies in its file."""
        return self.headers[self.files[name]].entries[name]

    def spec(self, name: str) -> TensorSpec:
        """Data type and shape of tensor `name`."""
        return self.headers[self.files[name]].specs[name]

    def extent(self, source: Source) -> tuple[Path, int, int]:
        """File, first byte and number of bytes of the tensor or of the slice of it."""
        entry = self.entry(source.name)
        path = self.headers[self.files[source.name]].path
        if source.index is None:
            return path, entry.start, entry.spec.nbytes
        assert 0 <= source.index < entry.spec.shape[0], f"{source} is outside of {entry.spec}"
        size = entry.spec.nbytes // entry.spec.shape[0]
        return path, entry.start + source.index * size, size

    def tensor(self, source: Source) -> torch.Tensor:
        """The tensor, or the slice of it, as a view of the mapped file."""
        tensor = self._map(source.name).tensor(source.name)
        return tensor if source.index is None else tensor[source.index]

    @property
    def details(self) -> Details:
        """What headers do not tell: the metadata of all files, and small tensors."""
        metadata = {key: text for header in self.headers.values() for key, text in header.metadata.items()}
        return Details(metadata, self._describe)

    def _describe(self, name: str) -> torch.Tensor:
        if self.files[name] in self.gone:
            raise CheckpointError(f"{name}: lies in a file that was deleted, and nothing else tells what it said")
        self.described_by.add(name)
        return self.tensor(Source(name)).clone()

    @property
    def beyond_headers(self) -> str:
        """What was read of it beside headers of safetensors, which `--consume` could not keep; empty if nothing."""
        files = [file for file, header in self.headers.items() if is_gguf(header)]
        return min((*self.described_by, *files), default="")

    def forget(self, source: Source) -> None:
        """Give back the memory into which the pages of `source` were mapped; they are read again when needed."""
        _, start, size = self.extent(source)
        self._map(source.name).forget(start, size)

    def _map(self, name: str) -> MappedFile:
        file = self.files[name]
        if file not in self._maps:
            self._maps[file] = MappedFile(self.headers[file])
        return self._maps[file]


@uncollected()
def open_checkpoint(source: str | Path, *, consumed: bool = False, indexed: bool = True) -> Checkpoint:
    """Read everything about a checkpoint but its weights.

    Args:
        source: A directory, one .safetensors or .gguf file, or a hub id `org/name[@revision]`, downloaded first.
        consumed: Do without shards that an earlier run has used up (`--consume`): their headers were kept.
        indexed: Let the index say which shard holds what; otherwise the shards do, all that are there.

    Raises:
        CheckpointError: It cannot be used; one message lists all that is wrong with it.
    """
    try:
        return _open(source, consumed, indexed)
    except OSError as error:
        raise CheckpointError(f"{quoted(str(source))}: cannot be opened: {error.strerror}") from error


def _open(source: str | Path, consumed: bool, indexed: bool) -> Checkpoint:
    path = Path(source)
    if not path.exists() and path.name in kept_files(path.parent):
        return _open_file(path, consumed)
    if not path.exists():
        if path.is_symlink():
            raise CheckpointError(f"{path}: a dangling link to {path.readlink()}")
        if not isinstance(source, str) or not is_hub_id(source):
            raise CheckpointError(
                f"{quoted(str(path))}: no such file or directory",
                hint="SOURCE is a directory, a .safetensors file or a hub id such as org/name or org/name@revision",
            )
        path = download(source)
    if path.is_file():
        return _open_gguf(path.parent, parts_of(path)) if path.suffix == SUFFIX else _open_file(path, consumed)
    if not path.is_dir():
        raise CheckpointError(f"{path}: neither a directory nor a .safetensors file")
    if not any(path.glob("*.safetensors*")) and not kept_files(path) and (files := gguf_files(path)):
        return _open_gguf(path, files)
    return _open_directory(path, consumed, indexed)


# Where the quantization config stands if config.json has none: file -> quant_method that it means, key that holds it.
QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", ""),
    "quant_config.json": ("awq", ""),
}


def _open_file(path: Path, consumed: bool) -> Checkpoint:
    if path.suffix != ".safetensors":
        hint = "name the directory, or a .safetensors or .gguf file"
        raise CheckpointError(f"{path}: not a .safetensors file", hint=hint)
    notes: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    stamps: dict[Path, FileStamp] = {}
    problems: list[str] = []
    headers = read_headers(path.parent, [path.name], consumed, problems)
    if problems:
        raise CheckpointError(problems[0])
    header = headers[path.name]
    gone = frozenset() if path.exists() else frozenset({path.name})
    if (path.parent / "config.json").exists():
        config = _read_config(path.parent, stamps)
    else:
        notes = (f"{path.name}: no config.json beside it, so nothing is known about the architecture",)
    return Checkpoint(path.parent, config, headers, dict.fromkeys(header.specs, path.name), (), gone, stamps, notes)


def _open_gguf(root: Path, files: list[Path]) -> Checkpoint:
    stamps: dict[Path, FileStamp] = {}
    config = _read_config(root, stamps) if (root / "config.json").exists() else {}
    model = read_gguf(files, config)
    problems: list[str] = []
    side, notes = find_side_files(root, set(model.headers), problems)
    if problems:
        raise CheckpointError(f"{root}: {problems[0]}")
    stamps |= {root / path: FileStamp.of((root / path).stat()) for path in side}
    shards = {name: file for file, header in model.headers.items() for name in header.specs}
    return Checkpoint(root, model.config, model.headers, shards, side, stamps=stamps, notes=(*model.notes, *notes))


def _open_directory(root: Path, consumed: bool, indexed: bool) -> Checkpoint:
    if (root / UNFINISHED).is_dir() and not (root / MANIFEST_FILE).exists():
        hint = "the command that writes it goes on with --resume"
        raise CheckpointError(f"{root}: an unfinished output of Tilewright", hint=hint)
    problems: list[str] = []
    config: dict[str, Any] = {}
    stamps: dict[Path, FileStamp] = {}
    shards = Shards({}, {}, ())
    side: tuple[Path, ...] = ()
    side_notes: tuple[str, ...] = ()
    try:
        config = _read_config(root, stamps)
    except CheckpointError as error:
        problems.append(str(error))
    try:
        shards = find_shards(root, consumed, problems, indexed=indexed)
        side, side_notes = find_side_files(root, set(shards.headers), problems)
        for path in (*([shards.index] if shards.index else []), *(root / path for path in side)):
            stamps[path] = FileStamp.of(path.stat())
    except CheckpointError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{error.filename}: cannot be read: {error.strerror}")
    if len(problems) == 1:
        raise CheckpointError(f"{root}: {problems[0]}" if str(root) not in problems[0] else problems[0])
    if problems:
        lines = "\n".join("  " + problem.replace("\n", "; ") for problem in problems)
        raise CheckpointError(f"{root}: {len(problems)} problems\n{lines}")
    gone = frozenset(file for file, header in shards.headers.items() if consumed and not header.path.exists())
    return Checkpoint(root, config, shards.headers, shards.files, side, gone, stamps, shards.notes + side_notes)


def _read_config(root: Path, stamps: dict[Path, FileStamp]) -> dict[str, Any]:
    path = root / "config.json"
    try:
        stamps[path] = FileStamp.of(path.stat())
        config = read_object(path, constants=True)
        return config if quantization_config(config) else config | _quantization_beside(root, stamps)
    except FileNotFoundError:
        hint = "SOURCE must be the directory that holds the model's config.json and its .safetensors files"
        if cuts := sorted(path.name for path in root.glob("rank-*-of-*")):
            hint = f"it holds the shares of a model that was cut; name one of them: {', '.join(cuts)}"
        raise CheckpointError(f"{root}: no config.json", hint=hint) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _quantization_beside(root: Path, stamps: dict[Path, FileStamp]) -> dict[str, Any]:
    """The quantization config that older tools, and ModelOpt, write into a file of its own; empty if there is none."""
    for name, (method, key) in QUANTIZATION_FILES.items():
        path = root / name
        if not path.exists():
            continue
        stamps[path] = FileStamp.of(path.stat())
        stated = read_object(path)
        block = stated.get(key, {}) if key else stated
        if isinstance(block, dict) and block:
            return {"quantization_config": {"quant_method": method} | block}
    return {}
