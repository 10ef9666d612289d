"""What a config writer is told about the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.kernels.rotation import Rotation


@dataclass(frozen=True)
class QuantConfigInputs:
    """The output of a conversion, as far as its config has to describe it.

    Attributes:
        unquantized: Paths of the modules whose matrices are not quantized, in the form that engines read.
        group: int4 group size.
        tied: Paths of modules that have no matrix of their own: output heads that use that of the embedding.
        kv_cache: How keys and values are quantized in the cache, where the files hold scales for that; else empty.
        rotated: Rotation -> paths of the modules whose input it rotates, in that form; None -> further modules whose
            input nothing rotates. Empty where no input is rotated.
    """

    unquantized: tuple[str, ...]
    group: int
    tied: tuple[str, ...] = ()
    kv_cache: Mapping[str, Any] = field(default_factory=dict)
    rotated: Mapping[Rotation | None, Sequence[str]] = field(default_factory=dict)
