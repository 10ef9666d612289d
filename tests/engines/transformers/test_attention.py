"""Attention in transformers models: decode steps are this package's, masks and gradients transformers' own."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from tilewright.engines.transformers import attention as hf_attention
from tilewright.engines.transformers.attention import use_attention

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
    assert model.config._attn_implementation == "sdpa"
    logits, calls = steps(model)
    assert calls == 2 * 2  # layers, tokens
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    assert steps(model_of())[1] == 0, "another model of the same process stays as it is"
    model.set_attn_implementation("eager")
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
    assert steps(model)[1] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool) -> None:
    model = model_of()
    use_attention(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(TOKENS[:, :1]).logits, model(TOKENS[:, :1]).logits)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
INDEX = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 32}
SELECTING = {
    "glm_moe_dsa": SMALL | HEADS | EXPERTS | LATENT | INDEX,
    "deepseek_v32": SMALL | HEADS | EXPERTS | LATENT | INDEX,
    "mistral": SMALL | HEADS | {"head_dim": 16, "sliding_window": 4},
    "gemma3_text": SMALL | HEADS | {"head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 2},
    "llama4_text": SMALL
    | HEADS
    | {"head_dim": 16, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 64},
}


@pytest.mark.parametrize("kind", SELECTING)
def test_windows_chunks_and_selected_keys_are_kept(kind: str) -> None:
    """Sequences three times as long as what a token may see, in one piece and token by token."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SELECTING[kind])).eval()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() > 1 else 1  # attention that is far from even
    wanted, _ = steps(model)
    key = next(name for name in ("index_topk", "sliding_window", "attention_chunk_size") if name in SELECTING[kind])
    torch.manual_seed(0)
    free: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SELECTING[kind] | {key: 64})).eval()
    free.load_state_dict(model.state_dict())
    seen = (steps(free)[0] - wanted).abs().max()
    use_attention(model)
    logits, _ = steps(model)
    error = (logits - wanted).abs().max()
    assert error * 10 < seen, f"off by {error}; without the rule the logits move by {seen}"
    assert error < 1e-3
