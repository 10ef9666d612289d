"""`quant_method: w8a8_int8`: SGLang."""

from __future__ import annotations

from typing import Any

from .inputs import QuantConfigInputs


def write(output: QuantConfigInputs) -> dict[str, Any]:
    """The block. Whatever Linear is not in `ignore` must be int8."""
    return {"quant_method": "w8a8_int8", "ignore": list(output.unquantized)}
