"""Read GGUF files as checkpoints: their tensors under Hugging Face's names, their metadata as a config.json.

The gguf package (extra `gguf`) parses the file, maps names and takes blocks apart; what is here arranges it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.safetensors_file import Entry, FileStamp, Header, read_header
from tilewright.kernels.tensors import TensorSpec

from ..families.gguf_names import DROPPED, EXPERTS, GGUF_ARCHITECTURES, SINGLE_ROW, GgufArchitecture

if TYPE_CHECKING:
    import gguf

SUFFIX = ".gguf"
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KEY = "gguf"  # below it, in a header's metadata, how the blocks of a tensor are to be read
BESIDE = "put the config.json of the original model beside the file"
WAY_OUT = "transformers reads more of them: from_pretrained(…, gguf_file=…), then save_pretrained"


@dataclass(frozen=True)
class GgufHeader(Header):
    """The header of a GGUF file: like one of safetensors, but tensors lie where it says, with gaps between them.

    Attributes:
        starts: First byte of each tensor.
    """

    starts: dict[str, int] = field(default_factory=dict)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor lies."""
        return {name: Entry(spec, self.starts[name]) for name, spec in self.specs.items()}


@dataclass(frozen=True)
class GgufModel:
    """What GGUF files hold.

    Attributes:
        headers: File name -> header.
        config: config.json, as the files' metadata or the one beside them say.
        notes: What was left out.
    """

    headers: dict[str, Header]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def is_gguf(header: Header) -> bool:
    """Whether a header is that of a GGUF file."""
    return isinstance(header, GgufHeader)


def read_again(header: Header) -> str:
    """The digest of a header as it is in the file now."""
    return _digest(header.path, header.data_start) if is_gguf(header) else read_header(header.path).digest


def gguf_files(root: Path) -> list[Path]:
    """The GGUF files of a directory: one, or the parts of one.

    Raises:
        CheckpointError: There are several, or parts are missing.
    """
    files = sorted(root.glob(f"*{SUFFIX}"))
    stems = {SPLIT.sub("", path.name) for path in files}
    if len(stems) > 1:
        names = ", ".join(path.name for path in files[:4])
        raise CheckpointError(f"{root}: holds {len(stems)} models as GGUF: {names}", hint="name one of the files")
    return parts_of(files[0]) if files else []


def parts_of(path: Path) -> list[Path]:
    """All files of which one is given: itself, or those of the split that it belongs to.

    Raises:
        CheckpointError: Some are missing.
    """
    split = SPLIT.search(path.name)
    if not split:
        return [path]
    count, stem = int(split[2]), path.name[: split.start()]
    parts = [path.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise CheckpointError(f"{path.parent}: {len(missing)} of {count} files are missing: {', '.join(missing[:8])}")
    return parts


def read_gguf(files: Sequence[Path], config: dict[str, Any]) -> GgufModel:
    """The tensors of GGUF files under Hugging Face's names.

    Args:
        files: All parts of one model.
        config: The config.json beside them; empty without one.

    Raises:
        CheckpointError: The gguf package is missing, a file is damaged, or its architecture is not known.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f"{files[0]}: reading GGUF takes the gguf package", hint="pip install 'tilewright[gguf]'"
        ) from None
    readers = {}
    for path in files:
        try:
            readers[path] = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read as GGUF: {error}", hint="fetch the file again") from error
    fields = {name: item for reader in reversed(readers.values()) for name, item in reader.fields.items()}
    metadata = {name: item.contents() for name, item in fields.items() if not name.startswith("tokenizer.ggml.token")}
    name = str(metadata.get("general.architecture"))
    architecture = GGUF_ARCHITECTURES.get(name)
    if architecture is None or any(metadata.get(f"{name}.{key}") for key in architecture.dense_without):
        kind = f"`{name}` with experts" if architecture else f"`{name}`"
        reason = f"GGUF of the architecture {kind} is not read; known: {', '.join(GGUF_ARCHITECTURES)}"
        raise CheckpointError(f"{files[0]}: {reason}", hint=WAY_OUT)
    config = _config(files[0], name, architecture, metadata, readers.values(), config)
    names = _names(name, architecture, int(metadata[f"{name}.block_count"]))
    headers: dict[str, Header] = {}
    left: list[str] = []
    for path, reader in readers.items():
        headers[path.name] = _header(path, reader, names, architecture, config, left)
    notes = (f"of GGUF, left out: {', '.join(sorted(left))}",) if left else ()
    return GgufModel(headers, config | {"quantization_config": {"quant_method": KEY}}, notes)


def _config(
    path: Path,
    name: str,
    architecture: GgufArchitecture,
    metadata: dict[str, Any],
    readers: Any,
    beside: dict[str, Any],
) -> dict[str, Any]:
    if beside:
        if beside.get("model_type") != architecture.model_type:
            stated = beside.get("model_type")
            reason = f"is a `{name}`, config.json beside it says model_type `{stated}`"
            raise CheckpointError(f"{path}: {reason}", hint=BESIDE)
        return {key: value for key, value in beside.items() if key != "quantization_config"}
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    if any(f"{name}.weight" in tensors for name in DROPPED):
        reason = "has a scaled rope (`rope_freqs`), whose parameters are not in the file"
        raise CheckpointError(f"{path}: {reason}", hint=BESIDE)
    rows = int(tensors["token_embd.weight"].shape[-1]) if "token_embd.weight" in tensors else 0
    found = architecture.config(name, metadata, "output.weight" not in tensors, rows)
    if isinstance(found, str):
        raise CheckpointError(f"{path}: config.json cannot be made of its metadata: {found}", hint=BESIDE)
    return found


def _names(name: str, architecture: GgufArchitecture, layers: int) -> dict[str, str]:
    """Module of the file -> module of Hugging Face, by the map of the gguf package."""
    import gguf

    kind = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    table = gguf.get_tensor_name_map(kind, layers)
    modules = architecture.hugging_face_modules(layers)
    return {theirs: module for module in modules if (theirs := table.get_name(module))}


def _header(
    path: Path,
    reader: gguf.GGUFReader,
    names: dict[str, str],
    architecture: GgufArchitecture,
    config: dict[str, Any],
    left: list[str],
) -> GgufHeader:
    size, start = path.stat().st_size, min((int(tensor.data_offset) for tensor in reader.tensors), default=0)
    header = GgufHeader(path, {}, {}, size, start, _digest(path, start), FileStamp.of(path.stat()))
    for tensor in sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset)):
        stem, _, suffix = tensor.name.rpartition(".")
        if stem in DROPPED:
            left.append(tensor.name)
            continue
        module = names.get(stem)
        if module is None or suffix not in {"weight", "bias"}:
            reason = f"`{tensor.name}` has no name in Hugging Face that is known"
            raise CheckpointError(f"{path}: {reason}", hint=WAY_OUT)
        full = module if EXPERTS in module else f"{module}.{suffix}"
        kind, shape = tensor.tensor_type.name, tuple(int(side) for side in reversed(tensor.shape))
        if module.endswith(SINGLE_ROW) and len(shape) == 1:
            shape = (1, *shape)
        heads = architecture.heads(module, config)
        if heads and (suffix == "bias" or shape[0] % (2 * heads)):
            raise CheckpointError(f"{path}: `{tensor.name}` {list(shape)} has rows in pairs", hint=WAY_OUT)
        if kind in PLAIN and not (heads and len(shape) == 2):
            header.specs[full] = TensorSpec(PLAIN[kind], shape)
        elif suffix == "weight" and int(tensor.n_bytes) % max(shape[0], 1) == 0 and len(shape) in {2, 3}:
            rows = shape[0] * (shape[1] if len(shape) == 3 else 1)
            header.specs[full] = TensorSpec(torch.uint8, (*shape[:-1], int(tensor.n_bytes) // rows))
            header.metadata[f"{KEY}.{full}"] = json.dumps({"type": kind, "columns": shape[-1], "heads": heads})
        else:
            raise CheckpointError(f"{path}: `{tensor.name}` is {kind} {list(shape)}, which is not read", hint=WAY_OUT)
        header.starts[full] = int(tensor.data_offset)
    return header


def _digest(path: Path, end: int) -> str:
    """sha256 of everything before the data."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(end)).hexdigest()
