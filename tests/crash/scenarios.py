"""The runs that are killed: what lies there before, the command, and what ends it afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tilewright.packer.checkpoint.consumed import CONSUMED

MODELS = Path(__file__).parents[2] / "examples" / "models"
LAYERS, WIDTH, VOCABULARY = 2, 128, 256


@dataclass(frozen=True)
class Scenario:
    """One kind of run.

    Attributes:
        name: For reports.
        command: Command and options, without source and output.
        earlier: Command that was carried out before into the same output; empty for none.
        earlier_kill: At which change of the disk that one was killed; 0: it ended.
        resumes: The run itself is given --resume.
        calibrated: The source is a model with a tokenizer.
    """

    name: str
    command: tuple[str, ...]
    earlier: tuple[str, ...] = ()
    earlier_kill: int = 0
    resumes: bool = False
    calibrated: bool = False

    @property
    def consumes(self) -> bool:
        """Whether the source is used up."""
        return "--consume" in self.command


QUANTIZE = ("quantize-model", "--solver", "rtn", "--max-shard-size", "70K", "--scheme")
PACK = ("pack-for-cpu", "--max-shard-size", "300K")
GPTQ = ("quantize-model", "--scheme", "int4", "--solver", "gptq", "--max-shard-size", "70K", "--calibrate-windows", "2")
CALIBRATE = ("--calibrate-window", "16", "--calibrate", str(MODELS / "heldout.txt"))
SCENARIOS = (
    Scenario("plain", (*QUANTIZE, "int8")),
    Scenario("overwrite", (*QUANTIZE, "int8", "--overwrite"), earlier=(*QUANTIZE, "block-fp8")),
    Scenario("overwrite-unfinished", (*QUANTIZE, "int8", "--overwrite"), (*QUANTIZE, "block-fp8"), earlier_kill=60),
    Scenario("consume", (*QUANTIZE, "int8", "--consume")),
    Scenario("tp2", (*PACK, "--tp", "2")),
    Scenario("overwrite-tp2", (*PACK, "--tp", "2", "--overwrite"), earlier=(*PACK, "--tp", "2", "--no-join")),
    Scenario("tp2-consume", (*PACK, "--tp", "2", "--consume")),
    Scenario("ep2-consume", (*PACK, "--ep", "2", "--consume")),
    Scenario("resumed", (*QUANTIZE, "w4afp8"), (*QUANTIZE, "w4afp8"), earlier_kill=60, resumes=True),
    Scenario("calibrated", (*GPTQ, *CALIBRATE), calibrated=True),
)


def make_source(root: Path, calibrated: bool) -> None:
    """A mixture-of-experts model in three shards; with the tokenizer of a shipped one if it is `calibrated`."""
    vocabulary = VOCABULARY if calibrated else 8
    generator = torch.Generator().manual_seed(4)
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (vocabulary, WIDTH) for name in ("model.embed_tokens", "lm_head")
    }
    shapes["model.norm.weight"] = (WIDTH,)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        shapes |= {f"{base}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{base}{name}.weight": (32,) for name in ("self_attn.q_norm", "self_attn.k_norm")}
        shapes |= {f"{base}post_attention_layernorm.weight": (WIDTH,)}
        shapes |= {f"{base}input_layernorm.weight": (WIDTH,), f"{base}mlp.gate.weight": (2, WIDTH)}
        for expert in range(2):
            experts = f"{base}mlp.experts.{expert}."
            shapes |= {f"{experts}{name}_proj.weight": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    names = list(shapes)
    root.mkdir()
    files = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        mine = names[number::3]
        save_file({name: torch.randn(shapes[name], generator=generator).bfloat16() for name in mine}, root / file)
        files |= dict.fromkeys(mine, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / name).write_bytes((MODELS / "tiny-qwen3-moe" / name).read_bytes() if calibrated else b"{}")
    (root / "code").mkdir()
    (root / "code" / "modeling.py").write_text("x = 1\n")
    fields = {"model_type": "qwen3_moe", "hidden_size": WIDTH, "num_experts": 2, "num_hidden_layers": LAYERS}
    fields |= {"moe_intermediate_size": WIDTH, "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": vocabulary, "num_experts_per_tok": 1}
    (root / "config.json").write_text(json.dumps(fields))


def arguments(command: tuple[str, ...], source: Path, output: Path, *more: str) -> list[str]:
    """What the command line holds."""
    return [*command[1:], "--jobs", "2", str(source), str(output), *more]


def wrong(
    scenario: Scenario, source: Path, output: Path, final: dict[str, str], shards: set[str], hashes: Callable
) -> str:
    """What is not as it must be when all is done; empty if nothing is."""
    found = hashes(output)
    if found != final:
        names = {name for name in found.keys() | final.keys() if found.get(name) != final.get(name)}
        return f"{len(names)} files differ: {sorted(names)[:6]}"
    left = {path.name for path in source.glob("*.safetensors")}
    if left != (set() if scenario.consumes else shards):
        return f"of the source is left {sorted(left)}"
    if not scenario.consumes and (source / CONSUMED).exists():
        return "a record of consumed shards in a source that was not consumed"
    return ""
