"""What a checkpoint is packed for: which weights, and the layout of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.rotation import Rotation
from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint.encoding import StoredWeight
from ..checkpoint.files import Checkpoint
from ..checkpoint.matrices import Matrix
from ..families.roles import Role

ALWAYS_TOLD = ("preferred", "id", "roles", "reduces_scales", "absorbs", "joins")  # fields that release 0.1 recorded
SYMMETRIC = ("cpu-int4-compact",)  # layouts without zero points, whose scales are those that the format's own are
PACKED_PREFIXES = ("cpu-", "gpu-")  # ids of layouts that kernels read; all others are checkpoint layouts


@dataclass(frozen=True)
class PackTarget(ABC):
    """What is packed for: decides the layout of each weight.

    Attributes:
        preferred: Layout to prefer, or None.
        id: Name of the target.
        roles: Roles of the weights that are packed; all others are copied.
        reduces_scales: Whether static activation scales of a layer's experts are also stored as one.
        absorbs: Whether `kv_b_proj` of latent attention is also split into `w_kc` and `w_vc`.
        joins: Whether Linears of the same input are packed as one.
        rotates: Whether its kernels rotate inputs.
    """

    preferred: str | None = None
    id: str = ""
    roles: tuple[Role, ...] = ()
    reduces_scales: bool = False
    absorbs: bool = False
    joins: bool = False
    rotates: bool = False

    @abstractmethod
    def layout(self, role: Role, fmt: WeightFormat, shape: tuple[int, ...], parts: int) -> Layout | Reject | None:
        """The layout of a weight; a reject if it cannot be packed; None if this target leaves it as it is."""

    def why_not_rotated(self, rotation: Rotation | None, fmt: WeightFormat, k: int) -> str | None:
        """Why K columns of this format cannot be packed with this rotation of their input, or None if they can."""
        if rotation is None:
            return None
        if not self.rotates:
            return f"its input is rotated by {rotation}, which no {self.id} kernel does"
        reject = rotation.why_not(fmt, k)
        return reject.reason if reject else None

    def fitting(self, weight: StoredWeight, notes: list[str]) -> PackTarget:
        """The target for one weight: without its preference, and with a note, where that layout loses numbers of it."""
        if self.preferred not in SYMMETRIC or not (weight.stored_format and weight.requantized):
            return self
        note = f"{weight.encoding} with zero points or other than bf16 scales: `{self.preferred}` does not hold those"
        if note not in notes:
            notes.append(note)
        return replace(self, preferred=None)

    def record(self) -> str:
        """What manifest and plan hash say of this target.

        Fields newer than release 0.1 are told only where they differ from their default, so that adding one changes
        neither the manifests nor the hash of a plan that does not use it: an unfinished run can still be resumed.
        """
        told = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name in ALWAYS_TOLD or getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(told)})"


@dataclass(frozen=True)
class CpuTarget(PackTarget):
    """Every weight in the first CPU layout that accepts it."""

    id: str = "cpu"
    roles: tuple[Role, ...] = ("linear", "expert", "head", "shared-gate", "mtp-projection")
    joins: bool = True
    rotates: bool = True

    def layout(self, role: Role, fmt: WeightFormat, shape: tuple[int, ...], parts: int) -> Layout | Reject | None:
        """The preferred layout where it accepts the weight, else the first CPU layout that does."""
        names = [self.preferred] if self.preferred else []
        names += [name for name in LAYOUTS if name.startswith(f"{self.id}-")]
        rejects = []
        for name in names:
            reject = LAYOUTS[name].accepts(fmt, shape, parts)
            if reject is None:
                return LAYOUTS[name]
            rejects.append(str(reject))
        return Reject(fmt.id, f"no layout takes {list(shape)}: {'; '.join(rejects)}")


@dataclass(frozen=True)
class GpuTarget(PackTarget):
    """The int4 experts in one GPU layout; all else as it is, for the engine that runs it."""

    preferred: str = "gpu-hopper-w4"
    id: str = "gpu"
    roles: tuple[Role, ...] = ("expert",)
    reduces_scales: bool = True

    def layout(self, role: Role, fmt: WeightFormat, shape: tuple[int, ...], parts: int) -> Layout | Reject | None:
        """The layout, or why it cannot hold the weight."""
        return LAYOUTS[self.preferred].accepts(fmt, shape, parts) or LAYOUTS[self.preferred]


def source_layout(matrix: Matrix, fmt: WeightFormat, specs: Mapping[str, TensorSpec]) -> Layout | None:
    """The checkpoint layout that has tensors of the same names and shapes as `specs`.

    Dtypes may differ (float16 weights, scales in bf16): unpacking then gives the layout's own.
    """
    if matrix.stored.layout:
        return LAYOUTS[matrix.stored.layout]
    for layout in LAYOUTS.values():  # one of the same dtypes, if there is one
        if layout.id.startswith(PACKED_PREFIXES) or layout.accepts(fmt, matrix.shape):
            continue
        if layout.specs(fmt, matrix.shape).items() <= specs.items():
            return layout
    shapes = {suffix: spec.shape for suffix, spec in specs.items()}
    for layout in LAYOUTS.values():
        if layout.id.startswith(PACKED_PREFIXES) or layout.accepts(fmt, matrix.shape):
            continue
        wanted = {suffix: spec.shape for suffix, spec in layout.specs(fmt, matrix.shape).items()}
        if wanted == {suffix: shape for suffix, shape in shapes.items() if suffix in wanted}:
            return layout
    return None


def why_not_rotated(target: PackTarget, matrices: Iterable[Matrix], fmt: WeightFormat) -> Iterator[Reject]:
    """Why matrices of this format cannot be packed with the rotation of their inputs; nothing if they can."""
    for matrix in matrices:
        if reason := target.why_not_rotated(matrix.stored.rotation, fmt, matrix.shape[1]):
            yield Reject(matrix.module, reason)


def misshapen(matrices: Iterable[Matrix], specs: Mapping[str, TensorSpec]) -> Iterator[Reject]:
    """Matrices without rows or columns, and biases that are not those of their matrix."""
    for matrix in matrices:
        if 0 in matrix.shape:
            yield Reject(matrix.module, f"{list(matrix.shape)} holds no weights")
        elif matrix.bias and specs[matrix.bias].shape[-1:] != (matrix.height,):
            found = list(specs[matrix.bias].shape)
            yield Reject(matrix.bias, f"is {found}, `{matrix.stored.tensors[0]}` has {matrix.height} rows")


def stored_specs(matrix: Matrix, checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """Suffix -> specification of all tensors under the matrix's module path but its bias."""
    stored = matrix.stored
    if not matrix.alone:
        return {"weight": TensorSpec(checkpoint.spec(stored.tensors[0]).dtype, matrix.shape)}
    names = (*stored.tensors, *stored.companions)
    return {name.removeprefix(f"{stored.module}."): checkpoint.spec(name) for name in names}


def scheme_of(formats: Mapping[Role, set[str]]) -> str:
    """Id of the scheme that gives these quantized formats to the roles; several joined by `+` if it is none of ours."""
    experts = formats.get("expert", set())
    found = set().union(*formats.values())
    if not found:
        return "none"
    if experts == {"int4-g128"} and found - experts <= {"fp8"} and formats.get("linear", set()) <= {"fp8"}:
        return "w4afp8"
    names = {"fp8": "block-fp8", "int8": "int8", "mxfp4": "mxfp4"}
    return "+".join(sorted({names.get(fmt, "int4") for fmt in found}))
