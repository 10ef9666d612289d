"""The bytes of conversions, frozen: a change of any of these hashes is a change that the CHANGELOG has to name."""

import hashlib
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.packer.schemes import SCHEMES

FORMS = [(scheme.id, form) for scheme in SCHEMES.values() for form in scheme.checkpoint_formats]
FROZEN = {
    "tiny-qwen3-moe block-fp8 native": "9ba464fbf8171349",
    "tiny-qwen3-moe block-fp8 compressed-tensors": "ba0a701f956ff266",
    "tiny-qwen3-moe int8 native": "0f6d46fd673f9f60",
    "tiny-qwen3-moe int8 compressed-tensors": "ff956a1e6545f944",
    "tiny-qwen3-moe int4 compressed-tensors": "b3c10f6be8b029f1",
    "tiny-qwen3-moe mxfp4 compressed-tensors": "074d95e77bac74f0",
    "tiny-qwen3-moe w4afp8 native": "886c0b2fcdb45bcf",
    "tiny-qwen3-moe w4afp8 compressed-tensors": "38d9b18ad5353adc",
    "tiny-deepseek-v3 block-fp8 native": "c9a4295b084a0660",
    "tiny-deepseek-v3 block-fp8 compressed-tensors": "45c912ff90e9ccba",
    "tiny-deepseek-v3 int8 native": "a956b8f3f6af53fc",
    "tiny-deepseek-v3 int8 compressed-tensors": "98dc0e990b9b0daf",
    "tiny-deepseek-v3 int4 compressed-tensors": "6c5c132260d8369f",
    "tiny-deepseek-v3 mxfp4 compressed-tensors": "1f1f7d7edd483e67",
    "tiny-deepseek-v3 w4afp8 native": "5cd1bff5eb5bf028",
    "tiny-deepseek-v3 w4afp8 compressed-tensors": "9e77adf2f3105f40",
}


def digest(done: Any) -> str:
    """Hash over names, dtypes, shapes and bytes of all tensors, and the config."""
    found = hashlib.sha256(json.dumps(done.plan.config, sort_keys=True).encode())
    for name, tensor in sorted(done.tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(("scheme", "form"), FORMS)
def test_bytes_are_frozen(scheme: str, form: str, tiny_model: Any, convert: Callable[..., Any]) -> None:
    key = f"{tiny_model.root.name} {scheme} {form}"
    assert digest(convert(tiny_model, scheme, checkpoint_format=form)) == FROZEN[key], key


@pytest.mark.parametrize(("scheme", "form"), FORMS)
def test_steps_travel_to_other_processes(scheme: str, form: str, tiny_model: Any, plan: Callable[..., Any]) -> None:
    tasks = plan(tiny_model, scheme, checkpoint_format=form).tasks
    assert pickle.loads(pickle.dumps(tasks)) == tasks
