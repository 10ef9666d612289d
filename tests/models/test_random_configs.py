"""Whatever `load_model` returns is what transformers computes with the same weights, or it raised: random configs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from family import BOTH_ROPES, LATENT, MAMBA2, ROPE, WINDOW, Family
from hypothesis import given, settings
from hypothesis import strategies as st
from table import load, quieten

import tilewright
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.verify.dequantized import dequantized_model, model_config

pytestmark = pytest.mark.slow
KINDS = ("llama", "mistral", "gemma2", "falcon_h1", "mixtral", "deepseek_v3")
ROUTED = ("mixtral", "deepseek_v3")


@st.composite
def families(draw: st.DrawFn, kind: str) -> Family:
    """A family with sizes, windows, biases, activations and rotary embeddings of any kind."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    kv_heads = one_of(1, 2, 3)
    options: dict[str, Any] = {
        "vocab_size": one_of(64, 77, 96),
        "hidden_size": one_of(48, 96),  # a multiple of every number of heads
        "intermediate_size": one_of(32, 48, 72, 96),
        "num_hidden_layers": 2,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * one_of(1, 2),
        "head_dim": one_of(8, 16, 24),
        "max_position_embeddings": 128,
        "rope_parameters": one_of(
            ROPE,
            ROPE | {"rope_theta": 1e4},
            {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
            {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        "tie_word_embeddings": one_of(True, False),
        "attention_bias": one_of(True, False),
        "hidden_act": one_of("silu", "gelu", "gelu_pytorch_tanh", "relu"),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    width = {key: options[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "hidden_act")}
    match kind:
        case "mistral":
            options |= {"sliding_window": one_of(None, 1, WINDOW)}
        case "gemma2":
            options |= {"sliding_window": one_of(3, WINDOW), "query_pre_attn_scalar": one_of(8, 20)}
            options |= {"attn_logit_softcapping": one_of(None, 2.0), "hidden_activation": options["hidden_act"]}
        case "falcon_h1":
            options |= MAMBA2 | {"mamba_d_ssm": 128, "key_multiplier": one_of(0.5, 1.0)}
        case "mixtral":
            options |= {"num_local_experts": one_of(3, 4), "num_experts_per_tok": one_of(1, 2)}
            options |= {"sliding_window": one_of(None, WINDOW)}
        case "deepseek_v3":
            options = LATENT | width | {"first_k_dense_replace": one_of(0, 1, 2), "num_nextn_predict_layers": 0}
            options |= {"q_lora_rank": one_of(None, 24), "v_head_dim": one_of(8, 16, 24)}
    if kind == "gemma2":
        options |= {"layer_types": list(one_of(("sliding_attention",) * 2, tuple(BOTH_ROPES)))}
    return Family(kind, options, routed=kind in ROUTED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=2)
def test_equal_or_refused(kind: str, data: st.DataObject) -> None:
    quieten()
    family = data.draw(families(kind))
    scheme = data.draw(st.sampled_from(["none", "block-fp8"]))  # those whose activations stay in 16 bits
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = tiny.make(family, directory / "source", seed=data.draw(st.integers(0, 99)))
        made = source
        try:
            if scheme != "none":
                made = directory / scheme
                tilewright.quantize(source, made, scheme, progress=tilewright.Silent())
            tilewright.pack(made, directory / "packed", progress=tilewright.Silent())
            ours = tilewright.load_model(directory / "packed")
        except tilewright.TilewrightError:
            return
        plain, fill, _ = dequantized_model(model_config(made), read_contents(open_checkpoint(made)))
        fill(plain, "")
        plain.to(torch.bfloat16).save_pretrained(directory / "plain")
        reference, theirs = load(family, directory / "plain"), load(family, directory / "plain", dtype=torch.bfloat16)
        inputs = tiny.text_inputs(family)
        for run in tiny.RUNS.values():
            wanted = run(reference, inputs)
            mine, other = (tiny.distance(run(model, inputs), wanted, family.routed) for model in (ours, theirs))
            assert mine <= 2 * other + 2e-3
