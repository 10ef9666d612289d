"""Records what bitsandbytes, HQQ and torchao write and read: `python -m tests.packer.quantized_sources.record`.

It needs the extra `oracles`. Each file in `recorded/` holds sources made by one library and the values that it reads.
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import torch
from safetensors.torch import save_file

from . import library_sources
from .recorded_sources import FOLDER, VALUES
from .sources import MODULE, VARIANTS

LIBRARIES = {"bnb": "bitsandbytes", "hqq": "hqq", "torchao": "torchao"}


def record(prefix: str, library: str) -> None:
    """Write the file of one library."""
    tensors: dict[str, torch.Tensor] = {}
    said: dict[str, Any] = {"version": importlib.metadata.version(library), "variants": {}}
    for name in [name for name in VARIANTS if name.startswith(prefix)]:
        source = VARIANTS[name]()
        values = source.oracle(source.tensors, source.block)[MODULE]
        said["variants"][name] = {"block": source.block, "metadata": source.metadata, "config": source.config}
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in source.tensors.items()}
        tensors[f"{name}/{VALUES}"] = values.float().contiguous()
    FOLDER.mkdir(exist_ok=True)
    save_file(tensors, FOLDER / f"{library}.safetensors", {"recorded": json.dumps(said)})


if __name__ == "__main__":
    library_sources.N, library_sources.K = 24, 128
    for _prefix, _library in LIBRARIES.items():
        record(_prefix, _library)
