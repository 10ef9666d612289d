"""What a scheme says: for each role of a weight, the numbers it gets and the layout they are stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilewright.kernels.formats import BF16, FORMATS, INT4_BY_GROUP, WeightFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.rotation import Rotation
from tilewright.packer.families.roles import Role
from tilewright.packer.quant_config.inputs import QuantConfigInputs


@dataclass(frozen=True)
class StorageSpec:
    """How one weight is stored.

    Attributes:
        format: Id of the weight format; "int4" is completed by the group size.
        layout: Id of the checkpoint layout.
        rotation: What its columns, and at run time its input, are multiplied by; None: nothing.
    """

    format: str
    layout: str
    rotation: Rotation | None = None

    def with_group(self, group: int) -> StorageSpec:
        """The target for int4 groups of this size."""
        return StorageSpec(INT4_BY_GROUP[group].id, self.layout) if self.format == "int4" else self

    @property
    def weight_format(self) -> WeightFormat:
        """The weight format itself."""
        return FORMATS[self.format]

    @property
    def is_quantized(self) -> bool:
        """Whether it takes fewer than 16 bits."""
        return self.weight_format.has_scales

    @property
    def checkpoint_layout(self) -> Layout:
        """The layout itself."""
        return LAYOUTS[self.layout]


SIXTEEN_BITS, TRANSPOSED = StorageSpec(BF16.id, "plain-bf16"), StorageSpec(BF16.id, "conv1d-bf16")


class ConfigWriter(Protocol):
    """Writes the `quantization_config` block."""

    def __call__(self, output: QuantConfigInputs) -> dict[str, Any]:
        """The block."""


@dataclass(frozen=True)
class CheckpointFormat:
    """A scheme in the spelling of one family of engines.

    Attributes:
        linear: What a Linear gets; None leaves it in 16 bits by design of the checkpoint format.
        expert: What a routed expert gets.
        config: Writes the quantization_config block.
        ignores_exclusions: Engines read no list of unquantized modules: every Linear has to be quantized.
        input_scale: Engines want a static activation scale tensor for each expert.
        rotates: Its config can say that the input of a weight is rotated, and there are kernels that rotate it.
        extra_files: Writes further files for further engines.
    """

    linear: StorageSpec | None
    expert: StorageSpec
    config: ConfigWriter
    ignores_exclusions: bool = False
    input_scale: bool = False
    rotates: bool = False
    extra_files: Callable[[Iterable[tuple[str, bool]]], dict[str, bytes]] | None = None

    def target(self, role: Role, group: int) -> StorageSpec | None:
        """What a weight of this role gets, but for rotations."""
        target = self.expert if role == "expert" else self.linear
        return target.with_group(group) if target else None


@dataclass(frozen=True)
class Scheme:
    """A choice of numbers.

    Attributes:
        id: Name on the command line.
        checkpoint_formats: --format -> names and dtypes on disk; the first one is the default.
        solver: Id of the default solver.
        groups: Group sizes that may be asked for; empty where the scheme has none to choose.
    """

    id: str
    checkpoint_formats: Mapping[str, CheckpointFormat] = field(default_factory=dict)
    solver: str = "rtn"
    groups: tuple[int, ...] = ()
