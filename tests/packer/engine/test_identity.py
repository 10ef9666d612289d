"""Which runs are the same run: options that are off, and fields of a target that are not used, change no hash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.identity import plan_hash
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget, GpuTarget, PackTarget
from tilewright.packer.plan import Plan


@dataclass(frozen=True)
class Later(CpuTarget):
    """The CPU target of a release to come, with one more field."""

    padding: int = 0


Later.__name__ = CpuTarget.__name__


def test_a_new_field_of_a_target_is_the_same_run_until_it_is_used(make_source: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(make_source())
    before, unused, used, other = (
        plan_hash(plan_pack(checkpoint, target), checkpoint, 1 << 20)
        for target in (CpuTarget(), Later(), Later(padding=64), CpuTarget(joins=False))
    )
    assert before == unused
    assert len({before, used, other}) == 3


@pytest.mark.parametrize("target", [CpuTarget(), CpuTarget("cpu-vnni-int8", absorbs=True, joins=False), GpuTarget()])
def test_manifests_name_a_target_as_release_0_1_did(target: PackTarget) -> None:
    kind, roles = type(target).__name__, target.roles
    assert target.record() == (
        f"{kind}(preferred={target.preferred!r}, id={target.id!r}, roles={roles!r}, "
        f"reduces_scales={target.reduces_scales}, absorbs={target.absorbs}, joins={target.joins})"
    )


@pytest.mark.parametrize("off", [None, False, (), ""])
def test_a_new_option_is_the_same_run_while_it_is_off(
    off: object, make_source: Callable[..., Path], make_plan: Callable[..., Plan]
) -> None:
    checkpoint = open_checkpoint(make_source())
    plan = make_plan(checkpoint)
    before = plan_hash(plan, checkpoint, 6000)
    assert plan_hash(replace(plan, options=plan.options | {"new": off}), checkpoint, 6000) == before
    assert plan_hash(replace(plan, options=plan.options | {"new": "on"}), checkpoint, 6000) != before
