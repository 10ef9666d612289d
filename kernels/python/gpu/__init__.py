"""Hopper: grouped products of int4 weights and FP8 activations, and the mixture of experts around them."""
