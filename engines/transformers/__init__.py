"""Packed directories as transformers models (extra `hf`).

Importing this lets transformers' own `from_pretrained` and `pipeline` take packed directories.
"""

from . import quantizer as quantizer
