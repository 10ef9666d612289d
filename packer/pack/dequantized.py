"""Matrices that a source quantizes and every engine reads in 16 bits: embeddings, routers, tables of positions."""

from __future__ import annotations

import torch

from ..checkpoint.matrices import Matrix
from ..plan import Fate, Piece, Task
from ..quantize.steps import Part, QuantizeStep
from ..schemes.scheme import SIXTEEN_BITS


def dequantizing(matrix: Matrix, reason: str) -> tuple[Task, dict[str, Fate]]:
    """The task that writes such a matrix in bf16, and what becomes of its tensors.

    Args:
        matrix: The matrix, alone in its tensors.
        reason: Why it is not packed.
    """
    part = Part(matrix.module, matrix.rows, SIXTEEN_BITS)
    outputs = part.specs(matrix.shape[1], torch.bfloat16)
    step = QuantizeStep(matrix.decoder, (part,), "rtn", matrix.shape[1])
    task = Task(matrix.sources, tuple(Piece(*output) for output in outputs.items()), step)
    fate = Fate("dequantized", f"{matrix.stored.encoding} -> bf16: {reason}", tuple(outputs))
    dropped = Fate("dropped", "belongs to the source's format")
    return task, dict.fromkeys(matrix.stored.tensors, fate) | dict.fromkeys(matrix.stored.companions, dropped)
