"""Frozen bytes: whatever the commands write for the shipped models, hashed, in every scheme and format.

A difference here is a change of output that users will see: intend it, say it in the CHANGELOG, and record again with
`python tests/test_frozen_bytes.py`. Only the command line is used, so that the same file runs on any version:
`old/.venv/bin/python tests/test_frozen_bytes.py --compare` says what has changed since. Left out of the hashes, as
each may change with a release: the version of the tool, the hash of the plan, versions of the record's schema, wording
of notes and reasons, and what the metadata of experts says about their activation.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import math
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

MODELS = Path(__file__).parent.parent / "examples" / "models"
RECORD = Path(__file__).parent / "golden" / "frozen_bytes.json"
NAMES = ("tiny-qwen3-moe", "tiny-deepseek-v3")
FORMATS = (
    "block-fp8 native",
    "block-fp8 compressed-tensors",
    "int8 native",
    "int8 compressed-tensors",
    "int4 compressed-tensors",
    "mxfp4 compressed-tensors",
    "w4afp8 native",
    "w4afp8 compressed-tensors",
)
OTHER_SOLVERS = {"block-fp8": "mse", "int8": "mse", "int4": "rtn", "mxfp4": "mse", "w4afp8": "rtn"}
GPU_LAYOUTS = ("gpu-hopper-w4", "gpu-cutlass-w4", "gpu-trtllm-w4")
FAST = {"tiny-qwen3-moe: int8 native", "tiny-deepseek-v3: w4afp8 native"}  # the slice of `make test-fast`
MODULE_KEYS_LATER = ("activation", "alpha", "limit")  # of experts
Hashes = dict[str, dict[str, str]]  # output -> part of it -> hash


def command(*arguments: object) -> tuple[int, str]:
    """Run `tilewright ...` in this process, as its console script does; the exit code and what it printed on stdout."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tilewright")
    out = io.StringIO()
    argv = ["tilewright", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            script.load()()
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


def hashed(*parts: bytes | str) -> str:
    """The first 12 digits of a SHA-256 over all parts and where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()[:12]


def shard_parts(path: Path) -> tuple[str, str, bytes]:
    """Name, header without what may change, and data of a .safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    metadata.pop("tilewright.tool", None)
    if modules := metadata.get("tilewright.modules"):
        kept = {
            name: {key: value for key, value in module.items() if key not in MODULE_KEYS_LATER}
            for name, module in json.loads(modules).items()
        }
        metadata["tilewright.modules"] = json.dumps(kept)
    return path.name, json.dumps(header), content[8 + length :]


def directory_hashes(root: Path) -> dict[str, str]:
    """One hash for each part of an output: weights, index, config, side files, manifest, ledger."""
    files = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
    manifest, ledger = (json.loads(files.pop(name).read_bytes()) for name in ("manifest.json", "ledger.json"))
    for name, stated in manifest["files"].items():
        content = (root / name).read_bytes()
        assert stated == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name
    facts = {"options": {key: value for key, value in manifest["options"].items() if value}}  # a new one is off
    facts |= {"layouts": manifest["layouts"], "files": list(manifest["files"])}
    fates = {
        name: {key: fate[key] for key in ("fate", "dtype", "shape", "outputs")}
        for name, fate in ledger["tensors"].items()
    }
    weights = [part for name, path in files.items() if name.endswith(".safetensors") for part in shard_parts(path)]
    index = [path.read_bytes() for name, path in files.items() if name.endswith(".index.json")]
    config = files.pop("config.json").read_bytes()
    side = [
        part
        for name, path in files.items()
        if not name.endswith((".safetensors", ".index.json"))
        for part in (name, path.read_bytes())
    ]
    return {
        "weights": hashed(*weights),
        "index": hashed(*index),
        "config": hashed(config),
        "side files": hashed(*side),
        "manifest": hashed(json.dumps(facts, sort_keys=True)),
        "ledger": hashed(json.dumps(fates)),
    }


@dataclass(frozen=True)
class Bench:
    """Runs commands on one model and hashes what each writes.

    Attributes:
        model: The source.
        folder: Where outputs go.
        found: Hashes so far.
    """

    model: Path
    folder: Path
    found: Hashes

    def run(self, job: str, source: Path, *options: str) -> Path:
        """One command; a refusal is a result too. Gives the directory that it wrote."""
        name = " ".join((job, *options))
        output = self.folder / f"{len(self.found)}-{job}"
        code, said = command(job, source, output, *options, "--jobs", "2", "--max-shard-size", "3MB")
        ranks = sorted(output.glob("rank-*")) if code == 0 else []
        if code:
            assert code == 1, said
            assert not list(output.rglob("*.safetensors"))
            self.found[name] = {"refused": "exit code 1"}
        for rank in ranks:
            self.found[f"{name}, {rank.name}"] = directory_hashes(rank)
        if code == 0 and not ranks:
            self.found[name] = directory_hashes(output)
        return output

    def quantized(self, form: str, *options: str) -> Path:
        """`quantize-model` into a scheme and format."""
        scheme, spelling = form.split()
        return self.run("quantize-model", self.model, "--scheme", scheme, "--format", spelling, *options)

    def packed(self, source: Path) -> None:
        """Every way to pack a source that is not tied to one layout, and the way back."""
        packed = self.run("pack-for-cpu", source)
        back = self.run("pack-for-cpu", packed, "--unpack")
        assert {path.name for path in back.glob("*.safetensors")}
        self.run("pack-for-cpu", source, "--tp", "2")
        self.run("pack-for-cpu", source, "--ep", "2")

    def packed_for_gpu(self, source: Path) -> None:
        """The layouts of int4 experts, whole and dealt to two ranks, and the way back."""
        for layout in GPU_LAYOUTS:
            packed = self.run("pack-for-gpu", source, "--layout", layout)
            if layout == GPU_LAYOUTS[0] and packed.is_dir():
                self.run("pack-for-gpu", packed, "--unpack")
                self.run("pack-for-gpu", source, "--ep", "2")


def record_format(bench: Bench, form: str) -> None:
    """All that can be done with one model in one scheme and format."""
    scheme = form.split()[0]
    quantized = bench.quantized(form)
    bench.packed(quantized)
    if scheme in {"int4", "w4afp8"}:
        bench.packed_for_gpu(quantized)
    if form.endswith("native") or scheme == "int4":
        bench.quantized(form, "--solver", OTHER_SOLVERS[scheme])
    if scheme == "int4":
        for group in ("32", "64"):
            bench.run("pack-for-cpu", bench.quantized(form, "--group-size", group))


def record_plain(bench: Bench) -> None:
    """16-bit weights packed as they are, the options of packing, and patterns."""
    bench.packed(bench.model)
    bench.run("pack-for-cpu", bench.model, "--no-join")
    bench.run("pack-for-cpu", bench.model, "--absorbed")
    bench.run("pack-for-gpu", bench.model)
    bench.quantized("int8 native", "--exclude", "*.self_attn.*", "--include", "lm_head")


LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 24,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 1024,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
LARGE_LINEARS = {  # of one layer: [N, K]
    "self_attn.q_a_proj": (256, 512),
    "self_attn.q_b_proj": (4 * 192, 256),
    "self_attn.kv_a_proj_with_mqa": (128 + 64, 512),
    "self_attn.kv_b_proj": (4 * 256, 128),
    "self_attn.o_proj": (512, 4 * 128),
}
LARGE_NORMS = {
    "input_layernorm": 512,
    "post_attention_layernorm": 512,
    "self_attn.q_a_layernorm": 256,
    "self_attn.kv_a_layernorm": 128,
}
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def large_layer(layer: int) -> Shapes:
    """Tensors of one layer of the large model: name -> dtype and shape."""
    linears = dict(LARGE_LINEARS)
    shapes: Shapes = {f"{name}.weight": ("BF16", (size,)) for name, size in LARGE_NORMS.items()}
    mlps = {"mlp": 1024} if layer < 3 else {"mlp.shared_experts": 256}
    if layer >= 3:
        shapes["mlp.gate.weight"] = ("BF16", (48, 512))
        shapes["mlp.gate.e_score_correction_bias"] = ("F32", (48,))
        mlps |= {f"mlp.experts.{expert}": 256 for expert in range(48)}
    for name, inner in mlps.items():
        linears |= {f"{name}.{m}_proj": (inner, 512) for m in ("gate", "up")} | {f"{name}.down_proj": (512, inner)}
    for name, (n, k) in linears.items():
        shapes[f"{name}.weight"] = ("F8_E4M3", (n, k))
        shapes[f"{name}.weight_scale_inv"] = ("F32", (-(-n // 128), -(-k // 128)))
    if layer == LARGE["num_hidden_layers"]:  # multi-token prediction
        shapes["eh_proj.weight"] = ("BF16", (512, 1024))
        shapes |= {f"{name}.weight": ("BF16", (512,)) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{name}.weight": ("BF16", (1024, 512)) for name in ("embed_tokens", "shared_head.head")}
    return {f"model.layers.{layer}.{name}": spec for name, spec in shapes.items()}


def write_headers_only(root: Path) -> Path:
    """A checkpoint such as DeepSeek-V3's in block FP8, with its MTP layer, of which only the headers are on disk."""
    shapes: Shapes = {f"{name}.weight": ("BF16", (1024, 512)) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = ("BF16", (512,))
    for layer in range(25):
        shapes |= large_layer(layer)
    root.mkdir()
    config = json.loads((MODELS / "tiny-deepseek-v3" / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | LARGE))
    _write_sparse_shards(root, shapes)
    return root


def _write_sparse_shards(root: Path, shapes: Shapes, shards: int = 4) -> None:
    sizes = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    names, weight_map = list(shapes), {}
    step = -(-len(names) // shards)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name in names[number * step : (number + 1) * step]:
            dtype, shape = shapes[name]
            size = sizes[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
            weight_map[name] = file
        content = json.dumps(header).encode()
        with (root / file).open("wb") as out:
            out.write(struct.pack("<Q", len(content)) + content)
            out.truncate(8 + len(content) + end)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def record_headers_only(bench: Bench) -> None:
    """What dry runs say about a large model: every tensor's group, dtype, size and fate."""
    source = write_headers_only(bench.folder / "source")
    jobs = [("quantize-model", "--scheme", scheme) for scheme in ("w4afp8", "int8")] + [("pack-for-cpu",)]
    for job, *options in jobs:
        code, out = command(job, source, bench.folder / "none", *options, "--dry-run", "--json")
        assert code == 0, out
        document = json.loads(out[out.index("{\n") :])
        keys = ("count", "fate", "before", "after", "bytes_before", "bytes_after")
        groups = [[group["name"], *(group[key] for key in keys)] for group in document["groups"]]
        totals = [document[key] for key in ("weights", "bytes_before", "bytes_after", "fates", "shards")]
        bench.found[" ".join((job, *options, "--dry-run"))] = {
            "groups": hashed(json.dumps(groups)),
            "totals": hashed(json.dumps(totals)),
        }


CASES = [f"{name}: {form}" for name in NAMES for form in ("plain", *FORMATS)] + ["headers only"]


def found_in(case: str) -> Hashes:
    """Run everything that belongs to a case."""
    name, _, form = case.partition(": ")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(MODELS / name, Path(folder), {})
        if case == "headers only":
            record_headers_only(bench)
        elif form == "plain":
            record_plain(bench)
        else:
            record_format(bench, form)
        return bench.found


def differences(case: str, before: Hashes, now: Hashes) -> Iterator[str]:
    """One line for each part of an output that is not what it was."""
    for output in before | now:
        old, new = before.get(output, {}), now.get(output, {})
        for part in old | new:
            if old.get(part) != new.get(part):
                yield f"{case}: {output}: {part} was {old.get(part)}, is {new.get(part)}"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES])
def test_bytes_are_those_of_the_record(case: str) -> None:
    recorded: dict[str, Hashes] = json.loads(RECORD.read_text())
    assert not list(differences(case, recorded[case], found_in(case)))


def test_record_names_all_cases() -> None:
    recorded: dict[str, Hashes] = json.loads(RECORD.read_text())
    assert list(recorded) == CASES
    assert set(CASES) >= FAST


def main(arguments: Sequence[str]) -> None:
    """Record all cases, or with --compare print what differs from the record."""
    if "--compare" in arguments:
        recorded = json.loads(RECORD.read_text())
        lines = [line for case in CASES for line in differences(case, recorded.get(case, {}), found_in(case))]
        sys.exit("\n".join(lines) or 0)
    cases = [
        f"{json.dumps(case)}: {{\n"
        + ",\n".join(f"  {json.dumps(output)}: {json.dumps(parts)}" for output, parts in found_in(case).items())
        + "\n}"
        for case in CASES
    ]
    RECORD.write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
