"""Use packed layers in a module of one's own: a feed-forward block, dense or of experts, straight from the mapped file.

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


class Mixture(nn.Module):
    """Every token by the two experts that a router of random weights likes best."""

    def __init__(self, packed: PackedCheckpoint, path: str) -> None:
        super().__init__()
        self.experts = packed[path]
        count, _, self.in_features = self.experts.w13.spec.shape
        self.router = nn.Linear(self.in_features, count, bias=False, dtype=torch.bfloat16)

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(2)
        return self.experts(x, chosen, weights)


def build(packed: PackedCheckpoint) -> tuple[str, nn.Module, int]:
    """Path, module and width of the first dense feed-forward block; of the first experts where there is none."""
    for name in packed:
        if name.endswith("mlp.gate_up_proj"):
            path = name.removesuffix(".gate_up_proj")
            return path, FeedForward(packed, path), packed[name].in_features
    path = next(name.removesuffix(".w13") for name in packed if name.endswith(".experts.w13"))
    mixture = Mixture(packed, path)
    return path, mixture, mixture.in_features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packed", type=Path, help="directory that pack-for-cpu wrote")
    options = parser.parse_args()

    packed = tilewright.load_packed(options.packed)
    path, block, width = build(packed)
    print(block)
    x = torch.randn(4, width, dtype=torch.bfloat16)
    print(path, tuple(x.shape), "->", tuple(block(x).shape))


if __name__ == "__main__":
    main()
