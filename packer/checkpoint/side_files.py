"""What lies in a checkpoint beside its weights, and is copied byte for byte."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright.kernels.packed.manifest import MANIFEST_FILE

from .shard_index import listing

# Weights in any format, of any engine: converted or left out, never copied.
WEIGHT_SUFFIXES = frozenset((
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml"),
    *(".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".npz"),
))
# Files that every output writes anew, and the bookkeeping of tools that fetch models.
OWN_FILES = frozenset(("config.json", MANIFEST_FILE, "ledger.json"))
BOOKKEEPING = frozenset((".git", ".cache"))


def find_side_files(root: Path, shards: set[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Every file below `root` that is neither weights nor their index, and notes on what is left out.

    Args:
        root: The checkpoint's directory.
        shards: Shard file names, which need no note.

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
            if path.is_symlink() or (here == root and (name in BOOKKEEPING or name.startswith(".tilewright-"))):
                subfolders.remove(name)
                left.append(f"{path.relative_to(root)}/")
        for name in names:
            path = (here / name).relative_to(root)
            if str(path) in shards or (here == root and name in OWN_FILES):
                continue
            if path.suffix in WEIGHT_SUFFIXES or name.endswith(".index.json") or not (root / path).is_file():
                left.append(str(path))
            else:
                kept.append(path)
    indexes = [name for name in left if name.endswith(".safetensors.index.json") and "/" not in name]
    left = sorted(name for name in left if name not in indexes)
    notes = (f"not copied: {listing(left)}",) if left else ()
    return tuple(sorted(kept)), notes
