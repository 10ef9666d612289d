"""Small sources of every encoding, each with the values that the library which defines the format gives for it.

`VARIANTS` maps a name to a function that makes one. Where the library cannot be installed beside this project's, the
formula of its documentation is written out in numpy, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

MODULE = "model.layers.0.self_attn.o_proj"
BASE: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 1}


def sized(n: int, k: int) -> dict[str, Any]:
    """config.json of a model whose `MODULE` is [n, k]."""
    return BASE | {"hidden_size": n, "num_attention_heads": 4, "head_dim": k // 4}


@dataclass
class QuantizedSource:
    """Tensors and config of a source.

    Attributes:
        tensors: Name -> tensor.
        block: Its quantization config.
        oracle: Values of each module as the format's own definition gives them, from tensors and block; raises where
            that definition does not accept them.
        config: The rest of its config.json.
        metadata: The free-form strings in the header of its file.
        key: Where the quantization config stands in config.json.
    """

    tensors: dict[str, torch.Tensor]
    block: dict[str, Any]
    oracle: Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, torch.Tensor]]
    config: dict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)
    key: str = "quantization_config"

    def document(self) -> dict[str, Any]:
        """config.json."""
        return self.config | {self.key: self.block}


VARIANTS: dict[str, Callable[[], QuantizedSource]] = {}


def generator(seed: int = 0) -> torch.Generator:
    """A stream of random numbers."""
    return torch.Generator().manual_seed(seed)


# GPTQ, by the description of its tensors


def pack_bits(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Codes [R, C] one after the other down each column, as int32 words [R * bits / 32, C]; R * bits % 32 == 0."""
    rows, columns = codes.shape
    stream = ((codes[:, None, :].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)[None, :, None]) & 1).reshape(
        rows * bits, columns
    )
    words = stream.reshape(-1, 32, columns) << np.arange(32, dtype=np.uint64)[None, :, None]
    return torch.from_numpy(words.sum(1).astype(np.uint32).view(np.int32).copy())


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> np.ndarray:
    """The inverse of `pack_bits`: int64 [count, C]."""
    raw = words.numpy().view(np.uint32)
    stream = ((raw[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1).reshape(-1, raw.shape[1])
    if len(stream) < count * bits:
        raise ValueError("too few words")
    chunks = stream[: count * bits].reshape(count, bits, -1).astype(np.int64)
    return np.asarray((chunks << np.arange(bits)[None, :, None]).sum(1))


def gptq_values(tensors: dict[str, torch.Tensor], block: dict[str, Any]) -> dict[str, torch.Tensor]:
    """scale[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n]), zero points one more than stored in the first version."""
    bits, version = block["bits"], block.get("checkpoint_format") or "gptq"
    qweight, scales = tensors[f"{MODULE}.qweight"], tensors[f"{MODULE}.scales"]
    k, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    size = block["group_size"] if block["group_size"] > 0 else k
    if scales.shape != (-(-k // size), n) or qweight.dtype != torch.int32:
        raise ValueError("shapes do not agree with the config")
    zeros = unpack_bits(tensors[f"{MODULE}.qzeros"].T.contiguous(), bits, n).T + (1 if version == "gptq" else 0)
    index = tensors.get(f"{MODULE}.g_idx", torch.arange(k) // size).numpy()
    codes = unpack_bits(qweight, bits, k)
    values = scales.double().numpy()[index] * (codes - zeros[index])
    return {MODULE: torch.from_numpy(values.T.copy())}


def _gptq(bits: int, group: int, symmetric: bool, order: bool, version: str, method: str = "gptq") -> QuantizedSource:
    k, n = 256, 96
    random = np.random.default_rng(abs(bits + group))
    groups = k // group if group > 0 else 1
    top = (1 << bits) - 1
    codes = random.integers(0, top + 1, (k, n))
    zeros = np.full((groups, n), 1 << (bits - 1)) if symmetric else random.integers(1, top, (groups, n))
    stored = zeros - (1 if version == "gptq" else 0)
    index = np.arange(k) // (group if group > 0 else k)
    if order:
        index = random.permutation(index)
    tensors = {
        f"{MODULE}.qweight": pack_bits(codes, bits),
        f"{MODULE}.qzeros": pack_bits(stored.T, bits).T.contiguous(),
        f"{MODULE}.scales": torch.from_numpy(random.uniform(0.001, 0.1, (groups, n))).to(torch.float16),
        f"{MODULE}.g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    block: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group, "sym": symmetric}
    if method == "gptq":
        block |= {"desc_act": order, "checkpoint_format": version, "damp_percent": 0.01, "true_sequential": True}
        block |= {"static_groups": False, "lm_head": False, "meta": {"quantizer": ["gptqmodel:1.0"]}}
        return QuantizedSource(tensors, block, gptq_values, sized(n, k))
    packing = {"gptq": "auto_round:auto_gptq", "gptq_v2": "auto_round:gptqmodel"}[version]
    block |= {"packing_format": packing, "data_type": "int", "iters": 200, "autoround_version": "0.5.1"}

    def values(found: dict[str, torch.Tensor], said: dict[str, Any]) -> dict[str, torch.Tensor]:
        versions = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2"}
        return gptq_values(found, said | {"checkpoint_format": versions[said["packing_format"]]})

    del tensors[f"{MODULE}.g_idx"]
    return QuantizedSource(tensors, block, values, sized(n, k))


for _bits in (2, 3, 4, 8):
    for _group in (32, 64, 128, -1):
        for _symmetric in (True, False):
            for _order in (False, True):
                if _bits in (4, 8) or _group == 128:
                    _version = "gptq_v2" if _group == 64 else "gptq"
                    _order = _order and _group > 0
                    _name = f"gptq-{_bits}-{_group}-{'sym' if _symmetric else 'asym'}-{'order-' * _order}{_version}"
                    VARIANTS[_name] = lambda a=(_bits, _group, _symmetric, _order, _version): _gptq(*a)
for _bits, _symmetric, _version in ((4, True, "gptq"), (4, False, "gptq_v2"), (8, True, "gptq"), (2, False, "gptq_v2")):
    _name = f"auto-round-{_bits}-{'sym' if _symmetric else 'asym'}-{_version}"
    VARIANTS[_name] = lambda a=(_bits, 128, _symmetric, False, _version, "auto-round"): _gptq(*a)


# AWQ, by the description of its tensors

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # column that lies in nibble i of a word


def awq_pack(codes: np.ndarray) -> torch.Tensor:
    """Codes [R, C] as int32 words [R, C / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, column in enumerate(AWQ_PLACES):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def awq_unpack(words: torch.Tensor) -> np.ndarray:
    """The inverse of `awq_pack`."""
    raw = words.numpy().view(np.uint32)
    codes = np.zeros((raw.shape[0], raw.shape[1] * 8), np.int64)
    for place, column in enumerate(AWQ_PLACES):
        codes[:, column::8] = (raw >> np.uint32(4 * place)) & 15
    return codes


def awq_values(tensors: dict[str, torch.Tensor], block: dict[str, Any]) -> dict[str, torch.Tensor]:
    """scale[k // group, n] * (code[k, n] - zero[k // group, n])."""
    qweight, scales = tensors[f"{MODULE}.qweight"], tensors[f"{MODULE}.scales"]
    size = block["group_size"] if block["group_size"] > 0 else qweight.shape[0]
    if scales.shape != (qweight.shape[0] // size, qweight.shape[1] * 8):
        raise ValueError("shapes do not agree with the config")
    codes, zeros = awq_unpack(qweight), awq_unpack(tensors[f"{MODULE}.qzeros"])
    index = np.arange(len(codes)) // size
    return {MODULE: torch.from_numpy((scales.double().numpy()[index] * (codes - zeros[index])).T.copy())}


def _awq(group: int, method: str = "awq") -> QuantizedSource:
    k, n = 256, 96
    random = np.random.default_rng(abs(group))
    groups = k // group if group > 0 else 1
    tensors = {
        f"{MODULE}.qweight": awq_pack(random.integers(0, 16, (k, n))),
        f"{MODULE}.qzeros": awq_pack(random.integers(0, 16, (groups, n))),
        f"{MODULE}.scales": torch.from_numpy(random.uniform(0.001, 0.1, (groups, n))).to(torch.float16),
    }
    block: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": group}
    if method == "awq":
        block |= {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    else:
        block |= {"packing_format": "auto_round:auto_awq", "sym": False, "data_type": "int"}
    return QuantizedSource(tensors, block, awq_values, sized(n, k))


for _group in (32, 64, 128, -1):
    VARIANTS[f"awq-{_group}"] = lambda group=_group: _awq(group)
VARIANTS["auto-round-awq"] = lambda: _awq(128, "auto-round")
