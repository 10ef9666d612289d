"""Tilewright: quantize and pack Hugging Face checkpoints offline, and run the packed layers as they lie on disk."""

__version__ = "0.1.0"
