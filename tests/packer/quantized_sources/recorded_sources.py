"""Sources that bitsandbytes, HQQ and torchao wrote, with the values that they read, recorded by `record.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .sources import MODULE, VARIANTS, QuantizedSource

FOLDER = Path(__file__).parent / "recorded"
VALUES = "values"  # name of what the library read


def load(path: Path, name: str) -> QuantizedSource:
    """One recorded source; its oracle knows the values of what was recorded and of nothing else."""
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["recorded"])["variants"][name]
        names = [key for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118  # no mapping
        tensors = {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in names}
    values = tensors.pop(VALUES)
    original = dict(tensors)

    def oracle(found: dict[str, torch.Tensor], block: dict[str, Any]) -> dict[str, torch.Tensor]:
        if {f"{MODULE}.SCB", f"{MODULE}.weight"} <= set(found) and block == said["block"]:  # as the record shows
            return {MODULE: found[f"{MODULE}.weight"] * found[f"{MODULE}.SCB"].reshape(-1, 1) * 7.874015718698502e-3}
        same = found.keys() == original.keys() and all(found[key] is tensor for key, tensor in original.items())
        if not same or block != said["block"]:
            raise ValueError("was not recorded")
        return {MODULE: values}

    return QuantizedSource(tensors, said["block"], oracle, said["config"], said["metadata"])


for _path in sorted(FOLDER.glob("*.safetensors")):
    with safe_open(_path, "pt") as _file:
        _names = list(json.loads(_file.metadata()["recorded"])["variants"])
    for _name in _names:
        VARIANTS[f"recorded-{_name}"] = lambda path=_path, name=_name: load(path, name)
