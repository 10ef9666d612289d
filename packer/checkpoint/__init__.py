"""How sources store their weights, and how the values are read back."""

from .inventory import Inventory, quantization_config, take_inventory

__all__ = ["Inventory", "quantization_config", "take_inventory"]
