"""The cases O1, O2, O3, O7, O8 and O9: small inputs with the outcome that a user sees."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import FORMATS
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.tensors import QTensor
from tilewright.packer.schemes import SCHEMES

Make = Callable[..., Any]
LAYER = "model.layers.0"
CONFIG = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256}


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16)


def read(done: Any, module: str, scheme: str, shape: tuple[int, int], form: str | None = None) -> QTensor:
    """The quantized weight of a module, by the inverse of its layout."""
    forms = SCHEMES[scheme].checkpoint_formats
    target = forms[form or next(iter(forms))].target("expert" if ".experts." in module else "linear", 128)
    fmt = FORMATS[target.format]
    suffixes = LAYOUTS[target.layout].specs(fmt, shape)
    return LAYOUTS[target.layout].unpack({s: done.tensors[f"{module}.{s}"] for s in suffixes}, fmt, shape)


def bound(q: QTensor, weight: torch.Tensor) -> torch.Tensor:
    """Largest error of each element that cases.md allows."""
    ones = QTensor(q.format, torch.full_like(q.codes, 1 + q.format.zero_point, dtype=torch.float32), q.scales)
    step = ones.dequantize()
    weight = weight.to(torch.float32).abs()
    if q.format.id == "fp8":
        return weight / 16 + step * 2**-10
    if q.format.id == "int8":
        return step / 2 + weight * 2**-22
    return step / 2 + weight / 256


@pytest.mark.parametrize("shape", [(576, 300), (127, 129), (1, 1), (4544, 128)])
def test_o1_odd_tails(shape: tuple[int, int], make_checkpoint: Make, convert: Make) -> None:
    weight = normal(*shape)
    done = convert(make_checkpoint({f"{LAYER}.mlp.down_proj.weight": weight}), "block-fp8")
    codes, scales = (done.tensors[f"{LAYER}.mlp.down_proj.{s}"] for s in ("weight", "weight_scale_inv"))
    assert codes.shape == shape
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert bool((torch.isfinite(scales) & (scales > 0)).all())
    q = read(done, f"{LAYER}.mlp.down_proj", "block-fp8", shape)
    assert ((q.dequantize() - weight.float()).abs() <= bound(q, weight)).all()


@pytest.mark.parametrize("solver", ["rtn", "mse"])
@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4"])
def test_o2_zero_and_tiny_tiles(scheme: str, solver: str, make_checkpoint: Make, convert: Make) -> None:
    weight = torch.zeros(256, 256, dtype=torch.bfloat16)
    weight[:128, :128] = normal(128, 128)
    weight[128:, :128] = 1e-30
    weight[128:, 128:] = normal(128, 128, seed=1)
    weight[200, 200] = 1e4
    done = convert(make_checkpoint({f"{LAYER}.self_attn.o_proj.weight": weight}), scheme, solver=solver)
    q = read(done, f"{LAYER}.self_attn.o_proj", scheme, (256, 256))
    values, source = q.dequantize(), weight.float()
    assert bool((torch.isfinite(q.scales) & (q.scales > 0)).all())
    assert torch.isfinite(values).all()
    assert (values[:128, 128:] == 0).all()
    step = QTensor(q.format, torch.full_like(q.codes, 1 + q.format.zero_point, dtype=torch.float32), q.scales)
    for n in (0, 128):
        for k in (0, 128):
            tile = slice(n, n + 128), slice(k, k + 128)
            most = source[tile].abs().max() + step.dequantize()[tile].max() / 2
            assert values[tile].abs().max() <= most
    if solver == "rtn":
        assert ((values - source).abs() <= bound(q, weight)).all()
        assert scheme == "int8" or (values[128:, :128] != 0).all()  # int8 scales span the whole row


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4", "w4afp8"])
def test_o2_broken_weight_is_named_with_its_index(
    scheme: str, value: float, make_checkpoint: Make, convert: Make
) -> None:
    weight = normal(256, 256)
    weight[131, 7] = value
    weight[200, 9] = float("nan")
    with pytest.raises(SchemeError, match=r"layers\.0\.mlp\.up_proj\.weight\[131, 7\] is (nan|inf|-inf)"):
        convert(make_checkpoint({f"{LAYER}.mlp.up_proj.weight": weight}), scheme)


def test_o2_tiny_block_gets_the_smallest_normal_scale(make_checkpoint: Make, convert: Make) -> None:
    weight = torch.full((2, 128), 1e-39, dtype=torch.float32)
    for scheme in ("block-fp8", "int8", "int4"):
        done = convert(make_checkpoint({f"{LAYER}.mlp.up_proj.weight": weight}), scheme)
        q = read(done, f"{LAYER}.mlp.up_proj", scheme, (2, 128))
        assert q.scales.unique().tolist() == [torch.finfo(torch.float32).tiny]


def experts_of(inner: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same four experts as stacks and as separate matrices."""
    gate_up, down = normal(4, 2 * inner, 256, scale=0.02), normal(4, 256, inner, seed=1, scale=0.02)
    stem = f"{LAYER}.mlp.experts"
    stacked = {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": down}
    separate = {}
    for expert in range(4):
        separate[f"{stem}.{expert}.gate_proj.weight"] = gate_up[expert, :inner]
        separate[f"{stem}.{expert}.up_proj.weight"] = gate_up[expert, inner:]
        separate[f"{stem}.{expert}.down_proj.weight"] = down[expert]
    return stacked, separate


@pytest.mark.parametrize("inner", [128, 96])
@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4", "w4afp8"])
def test_o3_stacked_equals_separate(scheme: str, inner: int, make_checkpoint: Make, convert: Make, plan: Make) -> None:
    stacked, separate = experts_of(inner)
    sources = [make_checkpoint(tensors) for tensors in (stacked, separate)]
    if inner == 96 and scheme == "w4afp8":  # no scale per 128 inputs fits, and engines take every expert as int4
        assert all("K = 96 is not a multiple of group 128" in str(plan(s, scheme).rejects) for s in sources)
        return
    one, other = (convert(source, scheme) for source in sources)
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), other.tensors[name].view(torch.uint8)), name
    made = {name.rpartition(".")[0] for name in one.tensors if name.endswith(("weight", "weight_packed"))}
    assert len(made) == 12
    in_16_bits = {name for name, tensor in one.tensors.items() if tensor.dtype == torch.bfloat16}
    scales = {name for name in in_16_bits if name.endswith(("weight_scale", "input_scale"))}
    odd = {f"{LAYER}.mlp.experts.{e}.down_proj.weight" for e in range(4)} if (scheme, inner) == ("int4", 96) else set()
    assert in_16_bits - scales == odd
    assert any("experts: 0.gate_proj, 0.up_proj" in note for note in one.plan.notes) == bool(odd)
    if scheme in {"block-fp8", "int8"}:
        before = sum(tensor.nbytes for tensor in stacked.values())
        assert sum(tensor.nbytes for tensor in one.tensors.values()) <= 0.6 * before
        for expert in range(4):
            module = f"{LAYER}.mlp.experts.{expert}.up_proj"
            q = read(one, module, scheme, (inner, 256))
            weight = separate[f"{module}.weight"]
            assert ((q.dequantize() - weight.float()).abs() <= bound(q, weight)).all()


def test_o3_gate_does_not_depend_on_up(make_checkpoint: Make, convert: Make) -> None:
    stacked, _ = experts_of(96)
    plain = convert(make_checkpoint(stacked), "block-fp8").tensors
    stacked[f"{LAYER}.mlp.experts.gate_up_proj"][:, 96:] *= 1000
    louder = convert(make_checkpoint(stacked), "block-fp8").tensors
    for expert in range(4):
        for suffix in ("weight", "weight_scale_inv"):
            name = f"{LAYER}.mlp.experts.{expert}.gate_proj.{suffix}"
            assert torch.equal(plain[name].view(torch.uint8), louder[name].view(torch.uint8))


@pytest.mark.parametrize(("scheme", "form"), [(s.id, f) for s in SCHEMES.values() for f in s.checkpoint_formats])
def test_o7_small_fp32_tensors_keep_their_bytes(scheme: str, form: str, make_checkpoint: Make, convert: Make) -> None:
    kept = {
        f"{LAYER}.mlp.gate.e_score_correction_bias": torch.linspace(6.80, 7.06, 256),
        f"{LAYER}.mlp.gate.weight": torch.randn(256, 256),
        f"{LAYER}.input_layernorm.weight": torch.randn(256),
    }
    experts = {f"{LAYER}.mlp.experts.0.{p}_proj.weight": normal(256, 256) for p in ("gate", "up", "down")}
    done = convert(
        make_checkpoint(kept | experts, CONFIG | {"model_type": "deepseek_v3"}), scheme, checkpoint_format=form
    )
    for name, tensor in kept.items():
        assert done.tensors[name].dtype == torch.float32
        assert torch.equal(done.tensors[name], tensor)
    assert len(done.tensors[f"{LAYER}.mlp.gate.e_score_correction_bias"].unique()) == 256


def tied(head: torch.Tensor | None, flag: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    embedding = normal(64, 256)
    tensors = {"model.embed_tokens.weight": embedding, f"{LAYER}.mlp.down_proj.weight": normal(256, 256)}
    if head is not None:
        tensors["lm_head.weight"] = embedding.clone()
    return tensors, CONFIG | {"tie_word_embeddings": flag}


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4", "w4afp8"])
def test_o8_tied_head(scheme: str, present: bool, make_checkpoint: Make, convert: Make) -> None:
    tensors, config = tied(normal(1, 1) if present else None, True)
    done = convert(make_checkpoint(tensors, config), scheme)
    assert torch.equal(done.tensors["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert ("lm_head.weight" in done.tensors) == present
    assert done.plan.config["tie_word_embeddings"] is True
    assert sum(t.nbytes for t in done.tensors.values()) < sum(t.nbytes for t in tensors.values())


def test_o8_absent_untied_head_needs_a_word(make_checkpoint: Make, plan: Make, convert: Make) -> None:
    source = make_checkpoint(*tied(None, False))
    reject = "\n".join(map(str, plan(source, "int8").rejects))
    assert "lm_head.weight: is absent, and config.json says tie_word_embeddings = false" in reject
    assert "--tied-head" in reject
    assert convert(source, "int8", tied_head="as-source").plan.config["tie_word_embeddings"] is False
    assert convert(source, "int8", tied_head="tie").plan.config["tie_word_embeddings"] is True


WRAPPED = "model.language_model.layers.0"
FORMS_OF_ONE_MODULE = (
    "self_attn.o_proj",
    f"{WRAPPED}.self_attn.o_proj",
    "model.layers.0.self_attn.o_proj",
    r"re:.*layers\.\d+\.self_attn\.o_proj$",
    "*.o_proj",
)


def test_o9_exclusion_forms(make_checkpoint: Make, convert: Make, plan: Make) -> None:
    kept = {
        "model.visual.blocks.0.attn.qkv.weight": normal(384, 128),
        f"{WRAPPED}.mlp.gate.weight": normal(8, 256),
        "model.language_model.embed_tokens.weight": normal(64, 256),
        "lm_head.weight": normal(64, 256),
    }
    linears = {f"{WRAPPED}.self_attn.{p}_proj.weight": normal(256, 256, seed=ord(p)) for p in "qkvo"}
    config = {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", "hidden_size": 256}}
    source = make_checkpoint(kept | linears, config)
    for scheme in ("block-fp8", "int8", "int4"):
        runs = [convert(source, scheme, exclude=(pattern,)) for pattern in FORMS_OF_ONE_MODULE]
        for done in runs:
            assert done.plan.config == runs[0].plan.config
            assert list(done.tensors) == list(runs[0].tensors)
            assert all(
                torch.equal(tensor.view(torch.uint8), runs[0].tensors[name].view(torch.uint8))
                for name, tensor in done.tensors.items()
            )
            for name in (*kept, f"{WRAPPED}.self_attn.o_proj.weight"):
                assert torch.equal(done.tensors[name], source.tensor(done.plan.tasks[0].sources[0].__class__(name)))
        block = runs[0].plan.config["quantization_config"]
        listed = next(block[key] for key in ("modules_to_not_convert", "ignore") if key in block)
        paths = {name.removesuffix(".weight") for name in (*kept, f"{WRAPPED}.self_attn.o_proj.weight")}
        assert paths | {path.replace("model.language_model.", "model.") for path in paths} == set(listed)
    unmatched = plan(source, "int8", exclude=("no.such.module",), strict=True)
    assert [str(reject) for reject in unmatched.rejects if "matches no module" in str(reject)]
    assert (
        "--exclude no.such.module: matches no module of the source"
        in plan(source, "int8", exclude=("no.such.module",)).notes
    )
