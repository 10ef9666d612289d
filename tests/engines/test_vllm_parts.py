"""Parts of the plug-in for vLLM that can be tested without it; `make test-vllm` tests the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.engines.vllm import version
from tilewright.engines.vllm.gating import refusal
from tilewright.kernels.errors import KernelUnavailableError


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"activation": "relu2"}, "`relu2`, which no bundled kernel does"),
        ({"apply_router_weight_on_input": True}, "scale the input"),
        ({"swiglu_limit": 7.0}, "clamp `silu` at 7.0"),
        ({"activation": "swigluoai", "swiglu_beta": 0.5}, "add 0.5 to up"),
    ],
)
def test_experts_that_no_kernel_runs(fields: dict[str, Any], reason: str) -> None:
    usual = {"apply_router_weight_on_input": False, "swiglu_limit": None, "swiglu_beta": None, "swiglu_alpha": None}
    activation = fields.pop("activation", "silu")
    layer = SimpleNamespace(**usual | fields)
    assert reason in str(refusal(layer, activation))
    assert refusal(SimpleNamespace(**usual), "silu") is None


def test_an_untested_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed", lambda: "0.32.4")
    version.check()
    monkeypatch.setattr(version, "installed", lambda: "9.1.0")
    with pytest.raises(KernelUnavailableError, match=r"vLLM 9\.1\.0 is installed"):
        version.check()
    monkeypatch.setenv(version.ANYWAY, "1")
    version.check()
