"""Offline conversion: quantize, pack and verify checkpoints."""
