"""What a streamed run sees is what hooks see on the whole model in memory, experts one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from tilewright.packer.calibrate.observe import BORROWED, ENOUGH, ExpertInputs, Observed, observe  # noqa: E402
from tilewright.packer.calibrate.statistics import InputStatistics  # noqa: E402
from tilewright.packer.checkpoint.files import open_checkpoint  # noqa: E402
from tilewright.packer.checkpoint.reading import read_contents  # noqa: E402
from tilewright.packer.verify.dequantized import stream_dequantized  # noqa: E402
from tilewright.packer.verify.text import evenly_spaced_windows, read_tokens  # noqa: E402

MODELS = Path(__file__).parents[3] / "examples" / "models"


def whole_model(path: Path, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs [tokens, K] of each Linear and of each expert's projections, from one forward of the model in memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}
    routed: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            module.register_forward_pre_hook(lambda _, x, name=name: seen.update({name: x[0].flatten(0, -2)}))
        if name.endswith("mlp.gate"):  # the router's third output says which experts each token goes to
            module.register_forward_hook(lambda _, x, y, name=name: routed.update({name: y[2]}))
            module.register_forward_pre_hook(lambda _, x, name=name: seen.update({name: x[0].flatten(0, -2)}))
    with torch.inference_mode():
        model(input_ids=windows, use_cache=False)
    for gate, chosen in routed.items():
        experts = model.get_submodule(gate.removesuffix("gate") + "experts")
        for e in range(experts.gate_up_proj.shape[0]):
            x = seen[gate][(chosen == e).any(1)]
            path_e = f"{gate.removesuffix('gate')}experts.{e}"
            gate_rows, up_rows = experts.gate_up_proj.data[e].chunk(2)
            seen[f"{path_e}.gate_proj"] = seen[f"{path_e}.up_proj"] = x
            seen[f"{path_e}.down_proj"] = F.silu(x @ gate_rows.T) * (x @ up_rows.T)
        del seen[gate]
    return seen


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-deepseek-v3"])
def test_streamed_statistics_are_those_of_the_whole_model(name: str) -> None:
    path = MODELS / name
    windows = evenly_spaced_windows(read_tokens(path, MODELS / "heldout.txt"), 8, 48)
    expected = whole_model(path, windows)
    stream = stream_dequantized(transformers.AutoConfig.from_pretrained(path), read_contents(open_checkpoint(path)))
    met = set()
    with torch.inference_mode():
        batches = [stream.embed(part, [48]) for part in windows.split(3)]
        hidden = [states for states, _ in batches]
        for index in range(stream.depth):
            layer_path, layer = stream.module(index)
            with stream.layer(index) as run:
                with observe(layer, layer_path, with_hessian=True) as observed:
                    hidden = [run(x, calls[index]) for x, (_, calls) in zip(hidden, batches, strict=True)]
                met |= compare(observed, expected)
    assert met == set(expected)


def compare(observed: Observed, expected: dict[str, torch.Tensor]) -> set[str]:
    found = dict(observed.linears)
    for path, inputs in observed.experts.items():
        for e in range(inputs.experts):
            count = int(inputs.counts()[e])
            tokens, counted = inputs.of(e)
            assert int((counted == 1).sum()) == count
            outer, inner = InputStatistics(tokens.shape[1]), InputStatistics(inputs.module.down_proj.shape[2])
            outer.add(tokens[:count])
            inner.add(inputs.inner(e, tokens[:count]))
            found |= {f"{path}.{e}.gate_proj": outer, f"{path}.{e}.up_proj": outer, f"{path}.{e}.down_proj": inner}
    for name, statistics in found.items():
        x = expected[name].double()
        assert statistics.tokens == len(x)
        assert statistics.hessian is not None
        if len(x):
            scale = float((x.T @ x).abs().max())
            torch.testing.assert_close(statistics.hessian.double(), x.T @ x, rtol=0, atol=2e-4 * scale)
            torch.testing.assert_close(statistics.channel_amax.double(), x.abs().amax(0), rtol=1e-3, atol=1e-4)
            assert statistics.percentile(99.5) == pytest.approx(
                float(x.abs().flatten().kthvalue(-(-x.numel() * 995 // 1000)).values), rel=0.01
            )
    return set(found)


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 4))


def test_a_rarely_hit_expert_borrows_tokens_that_count_less() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(ENOUGH + 100, 4)
    chosen = torch.zeros(len(tokens), 2, dtype=torch.int64)
    chosen[:, 1] = 1
    chosen[[7, 9], 1] = 2
    inputs = ExpertInputs(Stacks(), list(tokens.split(200)), list(chosen.split(200)))
    assert inputs.counts().tolist() == [len(tokens), len(tokens) - 2, 2]
    often, weights = inputs.of(1)
    assert len(often) == len(tokens) - 2
    assert bool((weights == 1).all())
    rare, weights = inputs.of(2)
    assert torch.equal(rare[:2], tokens[[7, 9]])
    assert len(rare) == ENOUGH
    assert weights.tolist() == [1, 1] + [BORROWED] * (ENOUGH - 2)
    assert len({tuple(row) for row in rare.tolist()}) == ENOUGH
    few = ExpertInputs(Stacks(), [tokens[:5]], [chosen[:5]])
    assert len(few.of(2)[0]) == 5
