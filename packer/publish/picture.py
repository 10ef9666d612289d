"""The picture of a model card: for each kind of module, its relative error beside the bound of its format, as SVG."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from typing import Any

ROW, LEFT, WIDTH = 22, 250, 420  # pixels


def draw(verification: Mapping[str, Any]) -> str | None:
    """An SVG picture of the weights' errors; None if no weight was quantized."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for tensor in verification["weights"]["tensors"]:
        if tensor["relative_error"] is not None and tensor["bound"]:
            kinds[f"{tensor['module']} ({tensor['format']})"].append(tensor)
    if not kinds:
        return None
    largest = max(tensor["bound"] for tensors in kinds.values() for tensor in tensors)
    height = ROW * (len(kinds) + 3)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 90} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        '<text x="8" y="16" font-weight="bold">Relative error of weights: root mean square (bar), '
        "worst tensor (line), bound of the format (red)</text>",
    ]
    for row, (kind, tensors) in enumerate(sorted(kinds.items()), start=1):
        y = ROW * row + 8
        errors = [tensor["relative_error"] for tensor in tensors]
        mean = math.sqrt(sum(error**2 for error in errors) / len(errors))
        scale = WIDTH / largest
        bound = min(tensor["bound"] for tensor in tensors)
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(kind)}</text>',
            f'<rect x="{LEFT}" y="{y + 2}" width="{mean * scale:.1f}" height="12" fill="#4878a8"/>',
            f'<path d="M{LEFT + max(errors) * scale:.1f} {y}v16" stroke="black"/>',
            f'<path d="M{LEFT + bound * scale:.1f} {y}v16" stroke="#c03028" stroke-width="2"/>',
            f'<text x="{LEFT + WIDTH + 8}" y="{y + 12}">{100 * mean:.2f}%</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
