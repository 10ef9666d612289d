"""Attention in transformers models: decode steps are this package's, masks and gradients transformers' own."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from tilewright.engines.transformers import attention as hf_attention
from tilewright.engines.transformers.attention import NAME, use_attention

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
TOKENS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(implementation: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": implementation}
    return AutoModelForCausalLM.from_config(LlamaConfig(**(sizes | heads | options))).eval()


def steps(model: Any, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
    """Logits of a prompt and two tokens after it, and how often `attend` was called."""
    with torch.no_grad(), mock.patch.object(hf_attention, "attend", wraps=hf_attention.attend) as spy:
        cache = {CACHE: DynamicCache(config=model.config)}
        logits = []
        for begin, end in ((0, 7), (7, 8), (8, 9)):
            part = None if mask is None else mask[:, :end]
            logits.append(model(TOKENS[:, begin:end], attention_mask=part, use_cache=True, **cache).logits)
    return torch.cat(logits, 1), spy.call_count


def test_decode_steps_are_run_by_attend_with_the_numbers_of_sdpa() -> None:
    model = model_of()
    wanted, calls = steps(model)
    assert calls == 0
    use_attention(model)
    assert model.config._attn_implementation == NAME
    logits, calls = steps(model)
    assert calls == 2 * 2  # layers, tokens
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    model.set_attn_implementation("sdpa")
    assert steps(model)[1] == 0


def test_padding_is_left_to_sdpa() -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    model = model_of()
    wanted, _ = steps(model, mask)
    use_attention(model)
    logits, calls = steps(model, mask)
    assert calls == 0
    assert torch.equal(logits, wanted)


def test_gradients_flow_as_before() -> None:
    model = model_of()
    use_attention(model)
    one = torch.tensor([[5]])
    model(one).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_a_choice_of_another_implementation_stays() -> None:
    model = model_of("eager")
    use_attention(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool) -> None:
    model = model_of()
    use_attention(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(TOKENS[:, :1]).logits, model(TOKENS[:, :1]).logits)
