"""A small checkpoint of every kind of tensor, and a plan over it whose steps are real but simple."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.tensors import TensorSpec
from tilewright.packer.checkpoint.files import Checkpoint
from tilewright.packer.plan import Copy, Fate, Piece, Plan, Source, Step, Task
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

MODELS = Path(__file__).parents[2] / "examples" / "models"


@dataclass(frozen=True)
class Rows(Step):
    """int8 codes and one fp32 scale per row, of a matrix or of one matrix of a stack."""

    codes: str
    scales: str

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        values = sources[0].float()
        if not values.isfinite().all():
            raise SchemeError(f"{self.codes}: not finite")
        scales = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        return {self.codes: (values / scales).round().to(torch.int8), self.scales: scales}


def plan_of(checkpoint: Checkpoint, options: dict[str, object] | None = None) -> Plan:
    """Matrices and stacks called `….weight` in bf16 become int8; the rest is copied."""
    tensors: dict[str, TensorSpec] = {}
    tasks: list[Task] = []
    fates: dict[str, Fate] = {}
    for name in checkpoint.files:
        spec = checkpoint.spec(name)
        if not (name.endswith("weight") and spec.dtype == torch.bfloat16 and len(spec.shape) >= 2):
            fates[name] = Fate("copied", "kept", (name,))
            tensors[name] = spec
            tasks.append(Task((Source(name),), (Piece(name, spec),), Copy()))
            continue
        scale_name = name + "_scale"
        fates[name] = Fate("quantized", "test", (name, scale_name))
        tensors[name] = TensorSpec(torch.int8, spec.shape)
        tensors[scale_name] = TensorSpec(torch.float32, (*spec.shape[:-1], 1))
        for index in range(spec.shape[0]) if len(spec.shape) == 3 else [None]:
            codes = TensorSpec(torch.int8, spec.shape[-2:])
            scales = TensorSpec(torch.float32, (spec.shape[-2], 1))
            at = index or 0
            pieces = (Piece(name, codes, at * codes.nbytes), Piece(scale_name, scales, at * scales.nbytes))
            tasks.append(Task((Source(name, index),), pieces, Rows(name, scale_name)))
    return Plan(
        tensors, tuple(tasks), fates, checkpoint.config | {"quantized": True}, options=options or {"scheme": "t"}
    )


def tensors_of(seed: int, layers: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {"embed.weight": normal(100, 40, dtype=torch.float16), "scalar": torch.tensor(1.5)}
    for layer in range(layers):
        tensors[f"layers.{layer}.proj.weight"] = normal(33 + layer, 70)
        tensors[f"layers.{layer}.experts.weight"] = normal(3, 16, 40)
        tensors[f"layers.{layer}.norm"] = normal(7, dtype=torch.float32)
    tensors |= {"empty": torch.empty(0, 64), "ids": torch.arange(5), "mask": torch.tensor([True, False, True])}
    tensors["fp8"] = normal(3, 5).to(torch.float8_e4m3fn)
    return tensors


def write_checkpoint(root: Path, shards: Sequence[Mapping[str, torch.Tensor]]) -> Path:
    """A directory with config, side files, shards and, for more than one shard, an index."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({"model_type": "test", "unknown": [1, {"ä": None}]}))
    (root / "tokenizer.json").write_text('{"a": 1}')
    (root / "code").mkdir()
    (root / "code" / "modeling.py").write_bytes(b"x = 1\r\n")
    (root / "pytorch_model.bin").write_bytes(b"old weights")
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    for name, tensors in zip(names, shards, strict=True):
        save_file(dict(tensors), root / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


@pytest.fixture
def make_source(tmp_path: Path) -> Callable[..., Path]:
    """make_source(seed=0, shards=2, name="source", layers=3): writes such a checkpoint and gives its directory."""

    def make(seed: int = 0, shards: int = 2, name: str = "source", layers: int = 3) -> Path:
        items = list(tensors_of(seed, layers).items())
        return write_checkpoint(tmp_path / name, [dict(items[i::shards]) for i in range(shards)])

    return make


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """make_plan(checkpoint, options=None): the plan over such a checkpoint."""
    return plan_of


@pytest.fixture
def make_moe(tmp_path: Path) -> Callable[[str], Path]:
    """make_moe(name): a tiny mixture-of-experts model in three shards, which every scheme can convert."""

    def make(name: str) -> Path:
        generator = torch.Generator().manual_seed(4)
        shapes = {"model.embed_tokens.weight": (8, 128), "model.norm.weight": (128,), "lm_head.weight": (8, 128)}
        for layer in range(2):
            base = f"model.layers.{layer}."
            shapes |= {f"{base}self_attn.{m}_proj.weight": (128, 128) for m in "qkvo"}
            shapes |= {f"{base}input_layernorm.weight": (128,), f"{base}mlp.gate.weight": (2, 128)}
            for expert in range(2):
                shapes |= {f"{base}mlp.experts.{expert}.{m}_proj.weight": (128, 128) for m in ("gate", "up", "down")}
        tensors = {n: torch.randn(shape, generator=generator).bfloat16() for n, shape in shapes.items()}
        items = list(tensors.items())
        root = write_checkpoint(tmp_path / name, [dict(items[i::3]) for i in range(3)])
        fields = {"model_type": "qwen3_moe", "hidden_size": 128, "num_experts": 2, "num_hidden_layers": 2}
        fields |= {"moe_intermediate_size": 128, "architectures": ["Qwen3MoeForCausalLM"]}
        (root / "config.json").write_text(json.dumps(fields))
        return root

    return make


@pytest.fixture
def make_scheme_plan() -> Callable[[str], Callable[[Checkpoint], Plan]]:
    """make_scheme_plan(scheme): what makes the plan of `quantize-model --scheme` for a checkpoint."""
    return lambda scheme: lambda checkpoint: plan_quantize(checkpoint, QuantizeOptions(scheme, solver="rtn"))


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Path]:
    """Writes a Llama checkpoint of random bf16 weights, with a tokenizer, and gives its directory."""

    def make(root: Path, layers: int, hidden: int, inner: int) -> Path:
        generator = torch.Generator().manual_seed(0)
        square, wide, tall = (hidden, hidden), (inner, hidden), (hidden, inner)
        shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": square for name in "qkvo"}
        shapes |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": tall}
        shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        everything = {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()}
        everything |= {"model.embed_tokens": (256, hidden), "lm_head": (256, hidden), "model.norm": (hidden,)}
        tensors = {
            f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
            if len(shape) == 2
            else torch.ones(shape)
            for name, shape in everything.items()
        }
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "vocab_size": 256,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        root.mkdir()
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, root / "model.safetensors")
        (root / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (root / name).write_bytes((MODELS / "tiny-qwen3-moe" / name).read_bytes())
        return root

    return make


@pytest.fixture(scope="session")
def peak_anonymous() -> Callable[..., int]:
    """Runs a command to its end and gives the most anonymous memory that it was seen with, in bytes."""

    def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                peak = max(peak, int(line.split()[1]) << 10 if line.startswith("RssAnon:") else 0)
            time.sleep(0.005)
        assert process.returncode == 0
        return peak

    return run
