"""Proof of accuracy: compare a candidate with its reference as weights, as layers and as a whole model."""
