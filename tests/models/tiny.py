"""Tiny models of a family, made by transformers: saved as a checkpoint, loaded, and run on the inputs of the table."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from family import WINDOW, Family
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto as auto
from transformers.models.minimax.modeling_minimax import MiniMaxCache

LENGTH = 5 * WINDOW  # tokens of an input: past every window, chunk, and selection of keys
STEPS = 6  # of which so many are fed one by one
PADDING = 5
AUTO = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING,
)
OUTPUTS = ("o_proj.weight", "self_attn.out_proj.weight", "self_attention.dense.weight", "attn.c_proj.weight")
KEPT = ("A_log", "dt_bias", "time_step", "diagonal_decay", "slope_rate", "tid2eid")


def make(family: Family, directory: Path, seed: int = 0) -> Path:
    """A checkpoint in bf16 with weights so large that every feature matters, and a tokenizer of characters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.model_type, **family.options)
    found = next(classes[type(config)] for classes in AUTO if type(config) in classes)
    model = (found[0] if isinstance(found, tuple) else found)._from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            enlarge(name, parameter)
    model.to(torch.bfloat16).save_pretrained(directory)
    vocabulary = {letter: i + 3 for i, letter in enumerate(string.ascii_lowercase + string.ascii_uppercase + " .,\n?")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary | {"?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def enlarge(name: str, parameter: torch.nn.Parameter) -> None:
    """Random values that carry activations through layers at their size, and biases and norms that are not trivial."""
    if name.endswith(KEPT) or not parameter.is_floating_point():
        return
    if name.endswith(("sinks", "sink_bias")):
        parameter.normal_().mul_(0.5).add_(3)  # as much as several keys
    elif "embed" in name or "wte" in name or "shared.weight" in name:
        parameter.normal_()
    elif parameter.dim() == 1:
        trivial = bool((parameter == parameter[0]).all()) or parameter.abs().max() < 0.2
        if trivial:
            parameter.add_(0.3 * torch.randn_like(parameter))
    else:
        inputs = parameter[0].numel() if parameter.dim() == 2 else parameter.shape[-1]
        gain = 3.0 if name.endswith(OUTPUTS) else 1.5
        parameter.normal_(0, gain * inputs**-0.5)


def text_inputs(family: Family, seed: int = 1) -> dict[str, Any]:
    """Inputs of a forward pass over two whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 60, (2, LENGTH), generator=generator)
    if family.model_type == "whisper":
        features = torch.randn(2, 16, 64, generator=generator)
        return {"input_features": features, "decoder_input_ids": tokens}
    if family.group == "encoder-decoder":
        return {"input_ids": torch.randint(3, 60, (2, 12), generator=generator), "decoder_input_ids": tokens}
    return {"input_ids": tokens}


def _call(model: Any, **inputs: Any) -> torch.Tensor:
    inputs = {
        key: value.to(model.dtype) if torch.is_tensor(value) and torch.is_floating_point(value) else value
        for key, value in inputs.items()
    }
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model = model.language_model  # what transformers 5.24 wraps around it looks for an output that it does not have
    output = model(**inputs)
    logits = output.logits if hasattr(output, "logits") else output[0]
    return logits.float()


@torch.inference_mode()
def whole(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits of whole sequences, without a cache: [tokens, V]."""
    return _call(model, use_cache=False, **inputs).flatten(0, 1)


@torch.inference_mode()
def padded(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits of sequences of which the first begins with padding, at the tokens that are none."""
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    mask = torch.ones_like(inputs[key])
    mask[0, :PADDING] = 0
    name = "decoder_attention_mask" if key == "decoder_input_ids" else "attention_mask"
    return _call(model, use_cache=False, **inputs, **{name: mask})[mask.bool()]


@torch.inference_mode()
def decoded(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits of the last tokens of sequences, fed one at a time with a cache."""
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    text = model.config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=text)
    if key == "decoder_input_ids":
        cache = EncoderDecoderCache(cache, DynamicCache(config=text))
    elif text.model_type == "minimax":  # whose linear attention has a cache of its own
        cache = MiniMaxCache()
    parts = inputs[key].split([inputs[key].shape[1] - STEPS] + [1] * STEPS, dim=1)
    return torch.cat([_call(model, **{**inputs, key: part, name: cache}, use_cache=True)[:, -1] for part in parts])


RUNS: dict[str, Callable[[Any, dict[str, Any]], torch.Tensor]] = {"whole": whole, "padded": padded, "decoded": decoded}


def distance(logits: torch.Tensor, wanted: torch.Tensor, routed: bool) -> float:
    """Relative error of logits [tokens, V]: of all; of the median token where a router may send some another way."""
    if routed:
        return float(((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).quantile(0.5))
    return float((logits - wanted).norm() / wanted.norm())
