"""The plan of a conversion: what becomes of every tensor of a source, decided from headers alone."""

from __future__ import annotations

from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint import detect_weights
from ..checkpoint.completeness import incomplete
from ..checkpoint.files import QUANTIZATION_FILES, Checkpoint
from ..checkpoint.naming import Naming
from ..checkpoint.packed import is_packed
from ..families import family_of, unknown_model
from ..families.layers import draft_layer, mtp_tensors
from ..garbage import uncollected
from ..plan import Plan
from ..quant_config.inputs import QuantConfigInputs
from ..schemes import SCHEMES
from ..schemes.scheme import CheckpointFormat
from .coverage import coverage_of
from .decisions import AnyDecision, Decider
from .emit import Emitter
from .model_config import cache_scheme, check_head, output_config, tied_heads
from .options import QuantizeOptions
from .rotations import rotated_modules, rotation_advice
from .unquantized import foreign_weights, fused_groups_apart, group_advice, read_elsewhere, unquantized_modules

STALE_FILES = (*QUANTIZATION_FILES, "quant_cfg.json")  # describe the source's quantization


@uncollected()
def plan_quantize(checkpoint: Checkpoint, options: QuantizeOptions, device: str = "cpu") -> Plan:
    """Decide everything about a conversion; no weight byte is read.

    Args:
        checkpoint: The opened source.
        options: The request.
        device: Where the arithmetic will be done; changes no byte.

    Returns:
        A complete plan. Refusals are collected in it, not raised.
    """
    chosen = options.resolved()
    if is_packed(checkpoint):
        hint = "pack-for-cpu --unpack turns it back into the checkpoint that it was made from; quantize that"
        return Plan({}, (), {}, {}, rejects=(Reject(str(checkpoint.root), "is packed already", hint),))
    checkpoint_format = SCHEMES[options.scheme].checkpoint_formats[chosen["form"]]
    specs = source_specs(checkpoint)
    inventory = detect_weights(specs, checkpoint.config, checkpoint.details)
    family = family_of(checkpoint.config)
    decider = Decider(
        checkpoint.config, family, checkpoint_format, options, chosen["group_size"], naming=Naming(family.experts)
    )
    decider.mtp = mtp_tensors(specs, checkpoint.config)
    if options.mtp == "draft":
        decider.naming = Naming(family.experts, draft_layer(decider.mtp))
    decisions = decider.decide(inventory, specs)
    emitter = Emitter(specs, chosen["solver"], decider.naming, device)
    emitter.emit(decisions)
    unquantized = tuple(unquantized_modules(decisions, specs, checkpoint_format, decider.naming))
    rotated = rotated_modules(decisions)
    tied, cache = tied_heads(specs, checkpoint.config, family), cache_scheme(specs, checkpoint.config)
    block = checkpoint_format.config(QuantConfigInputs(unquantized, chosen["group_size"], tied, cache, rotated))
    quantized = ((part.module, decision.role == "expert") for decision in decisions for part in decision.quantized)
    notes = [*decider.notes, *fused_groups_apart(decisions, family), *foreign_weights(decisions, checkpoint_format)]
    notes += rotation_advice(decisions)
    notes += group_advice(decisions, SCHEMES[options.scheme].groups, chosen["group_size"])
    if checkpoint_format.expert != checkpoint_format.linear and not any(one.role == "expert" for one in decisions):
        kind = f"--scheme {options.scheme} is for routed experts, and there are no routed experts in this model"
        notes.append(f"{kind}: --scheme block-fp8 says what it is")
    coverage = coverage_of(decisions, specs)
    notes += [*unknown_model(checkpoint.config), *coverage.notes(), *read_elsewhere(decisions, family)]
    rejects = [
        *inventory.rejects,
        *incomplete(checkpoint, family),
        *decider.rejects,
        *emitter.rejects,
        *_refusals(checkpoint, options, checkpoint_format, decisions, specs),
        *coverage.against(options.min_coverage),
    ]
    notes += [] if checkpoint.config else ["the source has no config.json"]
    config, config_notes = output_config(checkpoint.config, block, options, bool(decider.mtp))
    return Plan(
        tensors=emitter.tensors,
        tasks=tuple(emitter.tasks),
        fates=emitter.fates,
        config=config,
        metadata={"format": "pt"},
        options={"job": "quantize", **chosen},
        extra_files=checkpoint_format.extra_files(quantized) if checkpoint_format.extra_files else {},
        stale_files=STALE_FILES,
        rejects=tuple(rejects),
        notes=(*notes, *config_notes),
    )


def source_specs(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """Specification of every tensor that the index names, in the order in which they lie in the files."""
    return {
        name: spec
        for file, header in sorted(checkpoint.headers.items())
        for name, spec in header.specs.items()
        if checkpoint.files.get(name) == file
    }


def _refusals(
    checkpoint: Checkpoint,
    options: QuantizeOptions,
    checkpoint_format: CheckpointFormat,
    decisions: list[AnyDecision],
    specs: dict[str, TensorSpec],
) -> list[Reject]:
    """What the decisions as a whole do not allow."""
    rejects = check_head(checkpoint.config, specs, options)
    if options.mtp == "draft" and not draft_layer(mtp_tensors(specs, checkpoint.config)):
        reason = "--mtp draft needs exactly one layer behind the last regular one"
        rejects.append(
            Reject(checkpoint.root.name, reason, "other models hold their MTP layer under names of their own")
        )
    elif not any(decision.quantized for decision in decisions):
        reason = "nothing would be quantized: no Linear that a rule knows is left"
        rejects.append(Reject(checkpoint.root.name, reason, "see --dry-run for what became of each tensor"))
    if checkpoint_format.ignores_exclusions:
        rejects += [
            Reject(
                decision.weight.tensors[0],
                f"stays in 16 bits ({decision.reason}), but engines that read this format take every Linear as FP8",
                "use --format compressed-tensors, or quantize it",
            )
            for decision in decisions
            if decision.weight
            and decision.role in {"linear", "expert"}
            and not decision.is_quantized
            and decision.parts
        ]
    if options.strict:
        apart = fused_groups_apart(decisions, family_of(checkpoint.config))
        rejects += [Reject(note.partition(":")[0], note.partition(":")[2].strip()) for note in apart]
    return rejects
