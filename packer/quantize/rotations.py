"""Which modules take rotated inputs, spelled as engines look them up; and who rotates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.kernels.model_names import HEAD
from tilewright.kernels.rotation import Rotation

from ..families.roles import unwrapped
from .decisions import AnyDecision, firsts

RUN_BY = (
    "inputs are rotated, as `transform_config` in config.json says: pack-for-cpu reads it, and vLLM, on one CUDA GPU "
    "and for Linears without bias; transformers and SGLang do not read it, and would compute something else"
)
EXPERTS = "vLLM does not rotate the inputs of routed experts, and would compute something else: only pack-for-cpu does"


def rotated_modules(decisions: Sequence[AnyDecision]) -> Mapping[Rotation | None, Sequence[str]]:
    """Modules by the rotation of their input, None for those of which engines might think so; empty if none is rotated.

    A module of a wrapped text model is listed under both of its paths, because text-only loaders know the shorter one.
    """
    found: dict[Rotation | None, dict[str, None]] = {}
    if not any(part.target and part.target.rotation for one in firsts(decisions) for part in one.quantized):
        return {}
    for decision in decisions:
        for part in decision.quantized:
            rotation = part.target.rotation if part.target else None
            found.setdefault(rotation, {}).update({part.module: None, unwrapped(part.module): None})
    if not any(HEAD in modules for modules in found.values()):
        found.setdefault(None, {})[HEAD] = None  # of the class of the others, also where the files hold none
    return {rotation: list(modules) for rotation, modules in found.items()}


def rotation_advice(decisions: Sequence[AnyDecision]) -> list[str]:
    """Who can run the output, if inputs are rotated."""
    found = firsts(decisions)
    rotated = [one for one in found if any(part.target and part.target.rotation for part in one.quantized)]
    has_experts = any(decision.role == "expert" for decision in rotated)
    return [RUN_BY] * bool(rotated) + [EXPERTS] * has_experts
