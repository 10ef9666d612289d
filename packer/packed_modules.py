"""What the shards of a checkpoint say about packed modules."""

from __future__ import annotations

import json

from tilewright.kernels.module_spec import ModuleSpec

from .checkpoint import Checkpoint


def packed_modules(checkpoint: Checkpoint) -> dict[str, ModuleSpec]:
    """The packed modules of a checkpoint by name; none for one that is not packed."""
    return {
        name: ModuleSpec.from_json(name, fields)
        for header in checkpoint.headers.values()
        for name, fields in json.loads(header.metadata.get("tilewright.modules", "{}")).items()
    }
