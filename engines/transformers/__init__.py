"""Packed directories as transformers models (extra `hf`)."""
