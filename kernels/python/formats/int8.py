"""Symmetric int8 with one scale per row."""

from __future__ import annotations

import torch

from .integer import IntegerFormat

INT8 = IntegerFormat("int8", 8, torch.int8, qmax=127.0, block_n=1, native="int8")
