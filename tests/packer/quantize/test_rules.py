"""Patterns: dotted paths, tails, globs, regexes, and paths without a multimodal wrapper."""

import pytest

from tilewright.kernels.errors import PlanError
from tilewright.packer.quantize.rules import Pattern, first_match

ROUTER = "model.language_model.layers.10.mlp.gate"


@pytest.mark.parametrize(
    "text",
    [
        ROUTER,
        ROUTER + ".weight",
        "model.layers.10.mlp.gate",
        "mlp.gate",
        "gate",
        "layers.10",
        "model.layers.10.mlp",
        "*.mlp.gate",
        "layers.*.gate",
        "layers.1?.mlp.gate",
        r"re:.*mlp\.gate$",
        r"re:model\.layers\.\d+\.mlp\.gate$",
    ],
)
def test_matches(text: str) -> None:
    pattern = Pattern(text)
    assert pattern.matches(ROUTER)
    assert pattern.matched == [ROUTER]


@pytest.mark.parametrize(
    "text",
    ["ate", "mlp.gat", "layers.1", "model.layers.1", "*.gat", "layers.?.mlp.gate", r"re:mlp\.gate", "mlp.gate_up_proj"],
)
def test_whole_parts_only(text: str) -> None:
    assert not Pattern(text).matches(ROUTER)


def test_gate_is_not_gate_proj() -> None:
    assert not Pattern("mlp.gate").matches("model.layers.0.mlp.gate_proj")
    assert not Pattern("layers.1").matches("model.layers.10.mlp.gate")


def test_every_pattern_that_means_a_module_is_credited() -> None:
    patterns = [Pattern("lm_head"), Pattern("mlp.gate"), Pattern("*.gate")]
    assert first_match(patterns, ROUTER) is patterns[1]
    assert [len(pattern.matched) for pattern in patterns] == [0, 1, 1]


def test_a_broken_regex_is_named() -> None:
    with pytest.raises(PlanError, match=r"pattern `re:\(` is not a valid regex"):
        Pattern("re:(")
