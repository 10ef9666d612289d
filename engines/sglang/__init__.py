"""Packed directories for SGLang: the names that its own CPU kernels give to packed tensors."""
