"""What lies in a checkpoint beside its weights, and is copied byte for byte."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright.kernels.errors import quoted
from tilewright.kernels.packed.manifest import MANIFEST_FILE

from .consumed import CONSUMED
from .shard_index import leads_out, listing

# Weights in any format, of any engine: converted or left out, never copied.
WEIGHT_SUFFIXES = frozenset((
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml"),
    *(".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".npz"),
))
# Files that every output writes anew.
OWN_FILES = frozenset(("config.json", MANIFEST_FILE, "ledger.json"))


def find_side_files(root: Path, shards: set[str], problems: list[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Every file below `root` that is neither weights nor their index, and notes on what is left out.

    Hidden files may hold secrets, and links may lead anywhere: neither are copied. (Files of a hub's cache are links to
    its blobs, and are copied.)

    Args:
        root: The checkpoint's directory.
        shards: Shard file names, which need no note.
        problems: Gets one line for each name that no manifest could hold.

    Returns:
        Paths relative to `root`, sorted; notes.

    Raises:
        OSError: A directory cannot be read.
    """
    kept: list[Path] = []
    left: list[str] = []

    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        here = Path(folder)
        for name in list(subfolders):
            path = here / name
            if path.is_symlink() or name.startswith("."):
                subfolders.remove(name)
                left += [] if here == root and name == CONSUMED else [f"{path.relative_to(root)}/"]
        for name in names:
            path = (here / name).relative_to(root)
            if str(path) in shards or (here == root and name in OWN_FILES):
                continue
            if path.suffix in WEIGHT_SUFFIXES or name.endswith(".index.json") or not _may_be_copied(root, root / path):
                left.append(str(path))
            elif not _is_text(str(path)):
                problems.append(f"{quoted(str(path))}: the name is no UTF-8 text; rename it")
            else:
                kept.append(path)
    indexes = [name for name in left if name.endswith(".safetensors.index.json") and "/" not in name]
    hidden = sorted(name for name in left if Path(name).name.startswith("."))
    left = sorted(set(left) - set(indexes) - set(hidden))
    notes = [f"not copied: {listing(left)}"] if left else []
    notes += [f"hidden, and so not copied: {listing(hidden)}"] if hidden else []
    return tuple(sorted(kept)), tuple(notes)


def _may_be_copied(root: Path, path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and not leads_out(root, path)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
