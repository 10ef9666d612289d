"""What the shards of a checkpoint say about packed modules, and what lies beside them."""

from __future__ import annotations

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.module_spec import ModuleSpec, described_modules

from ..checkpoint import Inventory, quantization_config, take_inventory
from ..checkpoint.files import Checkpoint


def packed_modules(checkpoint: Checkpoint) -> dict[str, ModuleSpec]:
    """The packed modules of a checkpoint by name; none for one that is not packed."""
    return {
        name: ModuleSpec.from_json(name, fields)
        for header in checkpoint.headers.values()
        for name, fields in described_modules(header).items()
    }


def stored_inventory(checkpoint: Checkpoint) -> Inventory:
    """Everything that is stored as checkpoints store it: all of one that is not packed, else what no module holds.

    Raises:
        CheckpointError: Some of it cannot be read as weights; lists it.
    """
    modules = packed_modules(checkpoint)
    owned = {f"{name}.{suffix}" for name, spec in modules.items() for suffix in spec.tensors()}
    config = dict(checkpoint.config)
    if modules:  # what is left keeps the spelling of the checkpoint that was packed
        config["quantization_config"] = quantization_config(config).get("source")
    inventory = take_inventory({name: checkpoint.spec(name) for name in checkpoint.files if name not in owned}, config)
    if inventory.rejects:
        raise CheckpointError(f"{checkpoint.root}: cannot be read:\n  " + "\n  ".join(map(str, inventory.rejects)))
    return inventory
