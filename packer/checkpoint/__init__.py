"""How sources store their weights, and how the values are read back."""

from .detection import Inventory, detect_weights, quantization_config

__all__ = ["Inventory", "quantization_config", "detect_weights"]
