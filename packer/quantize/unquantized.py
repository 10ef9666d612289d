"""Which modules keep their 16 bits, spelled as engines look them up; and merged layers torn between two states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.kernels.tensors import TensorSpec

from ..checkpoint.naming import Naming
from ..families.family import ModelFamily
from ..families.roles import unwrapped
from ..schemes.scheme import CheckpointFormat
from .decisions import AnyDecision, firsts
from .steps import Part


def unquantized_modules(
    decisions: Sequence[AnyDecision],
    specs: Mapping[str, TensorSpec],
    checkpoint_format: CheckpointFormat,
    naming: Naming,
) -> list[str]:
    """Full dotted paths of all modules that hold a matrix which is not quantized, in source order.

    No patterns and no merged names: exact paths are the one form that every engine understands. A module of a wrapped
    text model is listed under both of its paths, because text-only loaders know the shorter one. Experts that are all
    unquantized are listed one by one and as the container that engines ask for.
    """
    modules: dict[str, None] = {}
    containers: dict[str, None] = {}  # of experts of which some are not quantized
    for decision in decisions:
        if decision.action == "drop" or decision.is_quantized or _as_engines_expect(decision, checkpoint_format):
            continue
        for module in _kept_matrices(decision, specs, naming):
            modules |= {module: None, unwrapped(module): None}
            containers |= dict.fromkeys(filter(None, [naming.experts.container(module)]))
    if containers:
        for part in (part for decision in decisions for part in decision.quantized):
            containers.pop(naming.experts.container(part.module) or "", None)
    for container in containers:
        modules |= {container: None, unwrapped(container): None}
    return list(modules)


def _kept_matrices(decision: AnyDecision, specs: Mapping[str, TensorSpec], naming: Naming) -> list[str]:
    """Modules of a decision that hold matrices which are not quantized."""
    if decision.weight:
        return [part.module for part in decision.parts if not part.is_quantized]
    name = decision.names[0]
    is_matrix = len(specs[name].shape) >= 2 and name.endswith(".weight")
    return [naming(name).removesuffix(".weight")] if is_matrix else []


def _as_engines_expect(decision: AnyDecision, checkpoint_format: CheckpointFormat) -> bool:
    """Whether an untouched weight of a quantized source already is what the new config promises."""
    weight, target = decision.weight, checkpoint_format.target(decision.role, 128)
    if decision.action != "keep" or not weight or not weight.quantized or not target:
        return False
    suffixes = {name.rpartition(".")[2] for name in weight.tensors}
    made = target.checkpoint_layout.specs(target.weight_format, weight.shape[-2:])
    return target.format == weight.stored_format and not weight.rotation and suffixes <= set(made)


def group_advice(decisions: Sequence[AnyDecision], groups: Sequence[int], group: int) -> list[str]:
    """A line about Linears whose K the int4 group does not divide, and a smaller group that would divide them all."""
    columns = {
        matrix.shape[1]
        for decision in decisions
        if decision.role in {"linear", "expert"} and decision.reason.endswith(f"of group {group}")
        for matrix in decision.matrices
    }
    better = [size for size in sorted(groups, reverse=True) if all(k % size == 0 for k in columns)]
    if not columns:
        return []
    listed = ", ".join(map(str, sorted(columns)))
    advice = f"--group-size {better[0]} would quantize them" if better else "no group size divides them all"
    return [f"Linears with K = {listed} stay in 16 bits: no multiple of group {group}; {advice}"]


def foreign_weights(decisions: Sequence[AnyDecision], checkpoint_format: CheckpointFormat) -> list[str]:
    """A line about weights of a quantized source that keep bytes which the new config does not describe."""
    foreign = [
        decision.weight
        for decision in decisions
        if decision.action == "keep"
        and decision.weight
        and decision.weight.quantized
        and not _as_engines_expect(decision, checkpoint_format)
    ]
    if not foreign:
        return []
    return [
        f"{foreign[0].module}: keeps its {foreign[0].encoding} ({len(foreign)} such modules); engines take what the "
        "config lists as unquantized for 16-bit weights, so they will not load these"
    ]


def read_elsewhere(decisions: Sequence[AnyDecision], family: ModelFamily) -> list[str]:
    """Lines about quantized weights that some who load this family cannot read."""
    notes = []
    stacked = next((one for one in decisions if one.index is not None and one.quantized), None)
    if stacked and family.experts.read_stacked_by:
        notes.append(
            f"{stacked.names[0]}: its experts are written one by one, as {stacked.quantized[0].module}; who reads them "
            f"only in stacks cannot load them ({family.experts.read_stacked_by}), pack-for-cpu can"
        )
    made = (part.module for decision in firsts(decisions) for part in decision.quantized)
    if turned := next((module for module in made if family.stores_transposed(module)), None):
        notes.append(
            f"{turned}: is a Conv1D in transformers, which loads those in 16 bits only; its codes are stored "
            "[out, in], as pack-for-cpu reads them"
        )
    return notes


def fused_groups_apart(decisions: Sequence[AnyDecision], family: ModelFamily) -> list[str]:
    """One line for each merged layer of which engines would find some parts quantized and others not."""
    kept = (d for d in decisions if not d.is_quantized)
    suspects = {layer for d in kept for part in d.parts if not part.is_quantized for layer in _merged(part, d, family)}
    states: dict[str, dict[str, bool]] = {}
    for decision in decisions if suspects else ():
        for part in decision.parts:
            for layer, name in _merged(part, decision, family).items():
                if layer in suspects:
                    states.setdefault(layer, {})[name] = part.is_quantized
    return [
        f"{layer}: {_some(parts, True)} quantized but {_some(parts, False)} not; engines merge them and refuse this"
        for layer, parts in states.items()
        if len(set(parts.values())) == 2
    ]


def _merged(part: Part, decision: AnyDecision, family: ModelFamily) -> dict[str, str]:
    """Layers that engines merge this part into, and what it is called there."""
    stem, _, last = part.module.rpartition(".")
    layers = {f"{stem}.{'/'.join(merged.parts)}": last for merged in family.merged if last in merged.parts}
    if decision.role == "expert":
        container = family.experts.container(part.module) or stem.rpartition(".")[0]
        layers[container] = part.module.removeprefix(f"{container}.")
    return layers


def _some(parts: Mapping[str, bool], state: bool) -> str:
    """The first few parts in this state."""
    names = [name for name, done in parts.items() if done is state]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
