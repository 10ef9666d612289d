"""How sources store their weights, and how the values are read back."""

from .declared import quantization_config
from .detection import Inventory, detect_weights

__all__ = ["Inventory", "quantization_config", "detect_weights"]
