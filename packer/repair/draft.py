"""A checkpoint while it is mended: what was found, and what its config and each of its tensors will be."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.kernels.tensors import TensorSpec

from ..checkpoint.files import Checkpoint
from ..plan import Copy, Step
from ..quant_config.exclusions import ENGINES

EVERY_ENGINE = tuple(ENGINES)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        file: The file that says or holds it.
        rule: What kind of damage it is.
        engines: The engines that stumble over it.
        problem: What is wrong.
        repair: What is done about it; None where nothing here can mend it.
    """

    file: str
    rule: str
    engines: tuple[str, ...]
    problem: str
    repair: str | None

    def __str__(self) -> str:
        done = self.repair or "cannot be mended here"
        return f"{self.file} [{self.rule}; {', '.join(self.engines)}]: {self.problem}: {done}"


@dataclass(frozen=True)
class OutputTensor:
    """What one tensor of the source becomes.

    Attributes:
        name: Its name in the output.
        spec: dtype and shape there.
        step: How it is made; a copy of its bytes unless something is wrong with it.
        beside: Further source tensors that the step reads.
    """

    name: str
    spec: TensorSpec
    step: Step | Copy = Copy()
    beside: tuple[str, ...] = ()


@dataclass
class Draft:
    """The output as it stands; rules change it and say what they found.

    Attributes:
        checkpoint: The source.
        engines: Names of the engines that the output is for.
        config: config.json of the output.
        tensors: Name in the source -> what becomes of it.
        findings: What was found so far.
    """

    checkpoint: Checkpoint
    engines: tuple[str, ...] = EVERY_ENGINE
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, OutputTensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = copy.deepcopy(self.checkpoint.config)
        self.tensors = {name: OutputTensor(name, self.checkpoint.spec(name)) for name in self.checkpoint.files}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specification of every tensor of the output."""
        return {tensor.name: tensor.spec for tensor in self.tensors.values()}

    @property
    def block(self) -> dict[str, Any]:
        """The quantization config, to be changed in place; empty, and no part of the config, if there is none."""
        block = self.config.get("quantization_config")
        return block if isinstance(block, dict) else {}

    def found(
        self, file: str, rule: str, engines: Mapping[str, Any] | tuple[str, ...], problem: str, repair: str | None
    ) -> None:
        """Add a finding, if it is about an engine that the output is for."""
        if concerned := tuple(engine for engine in engines if engine in self.engines):
            self.findings.append(Finding(file, rule, concerned, problem, repair))
