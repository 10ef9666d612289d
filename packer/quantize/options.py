"""What a conversion is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from tilewright.kernels.errors import OptionError, PlanError, check_choice
from tilewright.kernels.rotation import NAMES as ROTATIONS

from ..families.experts import ExpertsOrder
from ..schemes import SCHEMES
from ..solvers import SOLVERS

MTP = ("convert", "keep", "drop", "draft")
TIED_HEAD = ("as-source", "tie")
MANIFEST_NAMES = {"checkpoint_format": "form"}  # as manifests have called it since release 0.1


@dataclass(frozen=True)
class QuantizeOptions:
    """Everything that can change an output byte.

    Attributes:
        scheme: Id of the scheme.
        checkpoint_format: --format; None takes the scheme's first.
        group_size: int4 group size; None takes the scheme's first.
        exclude: Patterns of modules to leave as they are.
        include: Patterns of modules to quantize although they are left alone by default.
        experts_order: Declared order of gate and up in merged stacks.
        experts_transposed: Declares that stacks are stored [in, out].
        mtp: What to do with layers for multi-token prediction; "draft" makes a draft model of that layer alone.
        tied_head: What to do about an output head that is absent and not tied; None refuses.
        solver: Id of the solver; None takes the scheme's own.
        rotate_inputs: Rotation of the inputs of all quantized weights, such as "hadamard-64"; weights are rotated
            before they are rounded, and engines have to rotate what they multiply them by. None: none.
        strict: Refuse what would otherwise be noted.
        min_coverage: Refuse if less than this share, 0 to 1, of the weights in Linears, in experts and in matrices that
            no rule knows would be quantized; what `exclude`, `mtp` and `form` leave out is not counted.
    """

    scheme: str
    checkpoint_format: str | None = None
    group_size: int | None = None
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    experts_order: ExpertsOrder | None = None
    experts_transposed: bool = False
    mtp: Literal["convert", "keep", "drop", "draft"] = "convert"
    tied_head: Literal["as-source", "tie"] | None = None
    solver: str | None = None
    rotate_inputs: str | None = None
    strict: bool = False
    min_coverage: float = 0.0

    def __post_init__(self) -> None:
        check_choice("--scheme", self.scheme, SCHEMES)
        check_choice(
            "--format",
            self.checkpoint_format,
            dict.fromkeys(name for scheme in SCHEMES.values() for name in scheme.checkpoint_formats),
        )
        group = None if self.group_size is None else str(self.group_size)
        check_choice("--group-size", group, map(str, sorted({size for s in SCHEMES.values() for size in s.groups})))
        check_choice("--experts-order", self.experts_order, get_args(ExpertsOrder))
        check_choice("--mtp", self.mtp, MTP)
        check_choice("--tied-head", self.tied_head, TIED_HEAD)
        check_choice("--rotate-inputs", self.rotate_inputs, ROTATIONS)
        if not 0 <= self.min_coverage <= 1:
            raise OptionError(f"--min-coverage is {self.min_coverage:g}; a share from 0 to 1 is expected")

    def resolved(self) -> dict[str, Any]:
        """The options with every default filled in, by the names that they have in manifests.

        `min_coverage` is left out, for it changes no byte.

        Raises:
            PlanError: The scheme does not have this format or group size, or cannot say that inputs are rotated.
        """
        scheme = SCHEMES[self.scheme]
        able = [name for name, form in scheme.checkpoint_formats.items() if form.rotates] if self.rotate_inputs else []
        checkpoint_format = self.checkpoint_format or next(iter(able or scheme.checkpoint_formats))
        if checkpoint_format not in scheme.checkpoint_formats:
            raise PlanError(
                f"scheme {scheme.id} has no format `{checkpoint_format}`",
                hint=f"use --format {' or '.join(scheme.checkpoint_formats)}",
            )
        if self.rotate_inputs and checkpoint_format not in able:
            reason = f"format `{checkpoint_format}` of scheme {scheme.id} cannot say that inputs are rotated"
            hint = f"use --format {able[0]}" if able else f"schemes that can: {', '.join(_rotating_schemes())}"
            raise PlanError(f"--rotate-inputs: {reason}", hint=hint)
        if self.group_size and self.group_size not in scheme.groups:
            sizes = ", ".join(map(str, sorted(scheme.groups)))
            hint = f"its group sizes: {sizes}" if sizes else "leave --group-size out: this scheme has no groups"
            raise PlanError(f"scheme {scheme.id} has no group size {self.group_size}", hint=hint)
        group = self.group_size or (scheme.groups[0] if scheme.groups else 128)
        solver = SOLVERS[self.solver or scheme.solver].id
        fields = {MANIFEST_NAMES.get(name, name): value for name, value in asdict(self).items()}
        del fields["min_coverage"]
        return fields | {"form": checkpoint_format, "group_size": group, "solver": solver}


def _rotating_schemes() -> list[str]:
    return [
        name for name, scheme in SCHEMES.items() if any(form.rotates for form in scheme.checkpoint_formats.values())
    ]
