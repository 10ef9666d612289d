"""Checkpoints that others published with known damage, brought to what serving engines read."""
