"""What a config writer is told about the output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantConfigInputs:
    """The output of a conversion, as far as its config has to describe it.

    Attributes:
        unquantized: Paths of the modules whose matrices are not quantized, in the form that engines read.
        group: int4 group size.
    """

    unquantized: tuple[str, ...]
    group: int
