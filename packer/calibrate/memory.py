"""What a calibration needs of memory, by estimate from headers: its largest decoder layer decides."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from ..checkpoint.files import Checkpoint
from ..checkpoint.reading import read_contents
from ..families import family_of, known_folds
from ..families.config import HIDDEN, text_config
from ..families.experts import ExpertSpellings
from ..families.layers import LAYER
from ..families.norms import reads
from .method import BATCH_TOKENS, CalibrationTargets, Method

FP32 = 4  # bytes
# Bytes for each element of the Hessian of the weight that is being solved: reordered (4 + 4), damped, reversed, its
# factor, that turned round, the identity and the root (8 each), and the root once more (4). See `gptq.inverse_root`.
SOLVING = 60
# For each element of that weight: the part not yet rounded, codes twice, scales (4 each), and an update of the rest.
ROUNDING = 20
SOLVED = 2  # for each solved weight of the layer: its code, and once more while the file is written
STATES = 3  # copies of the hidden states of all tokens: before the layer, after it, and as the experts saw them
WIDE = 6  # matrices [tokens, widest of the layer] in fp32 at the same time; an expert may have seen all tokens
LIBRARIES = 150 << 20  # transformers, and the counts of magnitudes

Shape = tuple[int, int]


def calibration_memory(checkpoint: Checkpoint, method: Method, wanted: CalibrationTargets) -> int:
    """Bytes that a calibration allocates at most, beside what any run does.

    Args:
        checkpoint: The source.
        method: What is done.
        wanted: For which weights.
    """
    layers: dict[str, dict[str, Shape]] = defaultdict(dict)
    outside = 0
    for name, weight in read_contents(checkpoint).weights.items():
        found = LAYER.match(name)
        if found is None:
            outside += FP32 * math.prod(weight.shape)
        elif len(weight.shape) == 2:
            layers[found[1]][name.removesuffix(".weight")] = (weight.shape[0], weight.shape[1])
    config = text_config(checkpoint.config)
    states = FP32 * method.windows * method.window * int(config.get(HIDDEN, 0))
    spellings = family_of(checkpoint.config).experts
    largest = max((_layer(matrices, spellings, method, wanted) for matrices in layers.values()), default=0)
    return LIBRARIES + outside + STATES * states + largest


def _layer(
    matrices: Mapping[str, Shape], spellings: ExpertSpellings, method: Method, wanted: CalibrationTargets
) -> int:
    """Bytes for one layer: its weights, the Hessians of its inputs, and running it or solving its largest weight."""
    weights = FP32 * sum(n * k for n, k in matrices.values())
    experts = [shape for name, shape in matrices.items() if spellings.container(name)]
    tokens = method.windows * method.window
    widest = max(map(max, matrices.values()), default=0)
    running = max(min(BATCH_TOKENS, tokens) * widest, tokens * max(map(max, experts), default=0)) * FP32 * WIDE
    if method.kind == "scales":
        return weights + running
    linears = {name: shape for name, shape in matrices.items() if not spellings.container(name)}
    hessians = FP32 * sum(k * k for k in {_input(name): k for name, (_, k) in linears.items()}.values())
    solved = [shape for name, shape in matrices.items() if name in wanted.targets]
    if not method.feeds_back:
        return weights + hessians + max(running, ROUNDING * max((n * k for n, k in solved), default=0))
    solving = max((SOLVING * k * k + ROUNDING * n * k for n, k in solved), default=0)
    return weights + hessians + max(running, solving + SOLVED * sum(n * k for n, k in solved))


def _input(module: str) -> tuple[str, str]:
    """What a Linear reads, the same for those of one block that read one norm, such as q, k and v."""
    folds = (fold for family in known_folds().values() for fold in family)
    norm = next((fold.norm for fold in folds if reads(module, fold)), None)
    block, _, own = module.rpartition(".")
    return block, norm or own
