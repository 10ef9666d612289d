"""Use packed layers in a module of one's own: a gated feed-forward block, straight from the mapped file.

python examples/own_module.py PACKED
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import tilewright
from tilewright.kernels.packed.directory import PackedCheckpoint


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`; gate and up are one packed layer."""

    def __init__(self, packed: PackedCheckpoint, path: str) -> None:
        super().__init__()
        self.gate_up = packed[f"{path}.gate_up_proj"]
        self.down = packed[f"{path}.down_proj"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packed", type=Path, help="directory that pack-for-cpu wrote")
    options = parser.parse_args()

    packed = tilewright.load_packed(options.packed)
    path = next(name.removesuffix(".gate_up_proj") for name in packed if name.endswith("mlp.gate_up_proj"))
    block = FeedForward(packed, path)
    print(block)
    x = torch.randn(4, block.gate_up.in_features, dtype=torch.bfloat16)
    print(path, tuple(x.shape), "->", tuple(block(x).shape))


if __name__ == "__main__":
    main()
