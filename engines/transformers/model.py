"""Run a whole transformers model from a packed directory (extra `hf`)."""

from __future__ import annotations

import inspect
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.model_names import ACTIVATION_NAMES, LAYER_NUMBER
from tilewright.kernels.modules import PackedExperts, PackedLinear, PackedMlp
from tilewright.kernels.ops import experts as ops_experts
from tilewright.kernels.ops.reference_experts import gated
from tilewright.kernels.packed.directory import PackedCheckpoint, load_packed
from tilewright.kernels.packed.module_spec import Gating

from .attention import use_attention
from .mlps import replace_mlps
from .norms import replace_norms

WITHOUT_TRANSFORMERS = "`load_packed` gives the packed modules without transformers"
TRUST = "read the Python code in the directory; if you trust it, pass trust_remote_code=True"
UNSET = -(1 << 30)  # no value of an integer buffer
# Tensors that checkpoints carry and transformers computes or does not use.
UNUSED = re.compile(r"\.(?:input_scale|input_zero_point|activation_scale|rotary_emb\.inv_freq)$|\.w_[kv]c$|^mtp\.")


def load_model(
    path: str | Path,
    rank: int | None = None,
    device: str = "cpu",
    verify_checksums: bool = False,
    fused: bool = True,
    *,
    trust_remote_code: bool = False,
    activation_scales: str = "token",
) -> nn.Module:
    """The transformers model of a packed directory, its Linears and experts run by the bundled kernels.

    The model is built without weights; packed modules take the place of its Linears and experts, and what is left
    (norms, embeddings, routers) is filled with views of the same mapped files. Nothing is initialised, converted or
    copied.

    Args:
        path: The packed directory.
        rank: Which share of a model that was cut for several ranks; by default the rank of this process, if
            `torch.distributed` is set up.
        device: Where to run.
        verify_checksums: Compare every file with its checksum first.
        fused: On a CPU, also run gated MLPs, norms and the attention of decode steps by one operator each. False keeps
            the modules of transformers around packed Linears, for those who hook or replace these.
        trust_remote_code: Run the Python code that the directory brings for its model (`auto_map` in config.json).
            Without it, a model that only that code knows is refused.
        activation_scales: "token" or "group", as in `load_packed`.

    Returns:
        A `PreTrainedModel` in evaluation mode with `generate`; its attribute `packed` is the opened directory, and its
        `save_pretrained` copies that directory.

    Raises:
        CheckpointError: The directory cannot be run, or its tensors are not those of the model; lists all of them.
    """
    if rank is None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
    packed = load_packed(path, rank, device, verify_checksums, activation_scales)
    try:
        config = AutoConfig.from_pretrained(packed.root, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever building the model comes upon
        reason = f"transformers builds no model of its config: {_first_words(error)}"
        hint = TRUST if "auto_map" in packed.config and not trust_remote_code else WITHOUT_TRANSFORMERS
        raise CheckpointError(f"{packed.root}: {reason}", hint=hint) from error
    used = _replace_modules(model, packed, config)
    fused = fused and device == "cpu"
    if fused:
        replace_mlps(model, packed)
    if packed.sharding.ranks > 1:
        _add_up(model, packed)
    missing = _fill(model, packed, used)
    unused = [name for name in [*packed.specs, *packed.plain] if name not in used and not _ignored(name, config)]
    if missing or unused:
        lines = [f"`{name}` is not in the files" for name in missing]
        lines += [f"`{name}` has no place in {type(model).__name__}" for name in unused]
        raise CheckpointError(f"{packed.root}: does not fit the model:\n  " + "\n  ".join(lines))
    _keep_precision(model)
    _keep_dtype_of_activations(model, config)
    if fused:
        replace_norms(model)
        use_attention(model)
    if (packed.root / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(packed.root)
        except Exception as error:  # likewise
            reason = f"transformers cannot use generation_config.json: {_first_words(error)}"
            hint = "correct it, or remove it for transformers' defaults"
            raise CheckpointError(f"{packed.root}: {reason}", hint=hint) from error
    model.packed = packed
    model.save_pretrained = partial(_copy_directory, packed.root)
    model.eval()
    return model  # type: ignore[no-any-return]


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _ignored(name: str, config: Any) -> bool:
    """Whether transformers has no module for it on purpose: MTP layers, activation scales, buffers it computes."""
    layer = LAYER_NUMBER.search(name)
    layers = config.get_text_config().num_hidden_layers
    return bool(UNUSED.search(name)) or bool(layer and int(layer[1]) >= layers)


def _replace_modules(model: nn.Module, packed: PackedCheckpoint, config: Any) -> set[str]:
    """Put packed modules in the places of what they replace; returns the names of those that found one."""
    used = set()
    for name, spec in packed.specs.items():
        if _ignored(name, config):
            continue
        stack, _, kind = name.rpartition(".")
        is_stack = kind in {"w13", "w2"} and len(spec.shape) == 3
        places = [stack] if is_stack else [*spec.linears()] or [name]  # the model has the parts of a joined module
        try:
            replaced = {place: model.get_submodule(place) for place in places}
        except AttributeError:
            continue
        used.add(name)
        if kind == "w13" and is_stack:
            model.set_submodule(stack, _experts(stack, replaced[stack], packed, config))
        elif not is_stack:
            for place, old in replaced.items():
                _check_linear(place, old, packed)
                model.set_submodule(place, packed[place])
    return used


def _experts(stack: str, old: Any, packed: PackedCheckpoint, config: Any) -> PackedExperts:
    if len(inspect.signature(old.forward).parameters) != 3:
        reason = f"{type(old).__name__} is not called as routed experts are"
        raise CheckpointError(f"{packed.root}: `{stack}`: {reason}", hint=WITHOUT_TRANSFORMERS)
    text = config.get_text_config()
    activation = str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", ""))
    gating = _gating(f"{packed.root}: `{stack}`", old, ACTIVATION_NAMES.get(activation, activation))
    return packed.build_experts(stack, gating)


def _gating(subject: str, old: Any, activation: str) -> Gating:
    """The gating by which experts do what `old` does between their products.

    config.json does not say it all (GPT-OSS calls its clamped gate `silu`), so the module that is replaced is asked.

    Raises:
        CheckpointError: It computes something else.
    """
    alpha, limit = float(getattr(old, "alpha", 1.702)), float(getattr(old, "limit", 7.0))
    if not hasattr(old, "_apply_gate"):
        return Gating(activation, alpha, limit)
    side = torch.linspace(-12, 12, 25)
    gate, up = side.repeat(len(side)), side.repeat_interleave(len(side))
    wanted = old._apply_gate(torch.cat([gate, up]) if old.is_concatenated else torch.stack([gate, up], -1).flatten())
    for candidate in (activation, "clamped_swiglu"):
        if candidate not in ops_experts.ACTIVATIONS:
            continue
        if torch.allclose(gated(gate, up, candidate, alpha, limit), wanted, rtol=1e-4, atol=1e-4):
            return Gating(candidate, alpha, limit)
    known = ", ".join(ops_experts.ACTIVATIONS)
    reason = f"{type(old).__name__} gates its experts in another way than {known}"
    raise CheckpointError(f"{subject}: {reason}", hint=WITHOUT_TRANSFORMERS)


def _add_up(model: nn.Module, packed: PackedCheckpoint) -> None:
    """Let modules that hold some of the columns or experts add up their results over the ranks."""
    size = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if size != packed.sharding.ranks:
        raise CheckpointError(
            f"{packed.root}: is cut for {packed.sharding.ranks} ranks, this process is one of {size}",
            hint=f"start it with `torchrun --nproc-per-node {packed.sharding.ranks}` and `init_process_group`",
        )
    for module in model.modules():
        match module:
            case PackedExperts():
                spec = module.w2.spec
            case PackedMlp():
                spec = module.down_proj.spec
            case PackedLinear():
                spec = module.spec
            case _:
                continue
        module.reduce = sum_over_ranks if spec.needs_all_reduce else None


# The last sum stays ours until the next one. Otherwise a thread of gloo may be its last owner and free its tensor while
# the interpreter ends, which takes the process down (seen with torch 2.13 and Python 3.11).
_LAST_WORK: list[distributed.Work] = []


def sum_over_ranks(y: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's `y`, added in fp32."""
    total = y.to(torch.float32)
    work = distributed.all_reduce(total, async_op=not torch.compiler.is_compiling())
    if work is not None:
        work.wait()
        _LAST_WORK[:] = [work]
    return total.to(y.dtype)


def _check_linear(name: str, old: nn.Module, packed: PackedCheckpoint) -> None:
    new = packed[name]
    if not isinstance(old, nn.Linear) or not isinstance(new, PackedLinear):
        reason = f"`{name}` is a packed Linear, in the model it is {type(old).__name__}"
        raise CheckpointError(f"{packed.root}: {reason}", hint=WITHOUT_TRANSFORMERS)
    if type(old).forward is not nn.Linear.forward:
        reason = f"`{name}` is a packed Linear, {type(old).__name__} computes something else"
        raise CheckpointError(f"{packed.root}: {reason}", hint=WITHOUT_TRANSFORMERS)
    needed, found = [old.out_features, old.in_features], list(new.spec.whole or new.spec.shape)
    if needed != found:
        raise CheckpointError(f"{packed.root}: `{name}` is {found}, the model needs {needed}")


def _fill(model: nn.Module, packed: PackedCheckpoint, used: set[str]) -> list[str]:
    """Give every tensor that is still on the meta device its value; returns the names of those that have none."""
    missing: list[str] = []
    computed: dict[str, list[str]] = {}
    for path, module in list(model.named_modules()):
        prefix = f"{path}." if path else ""
        tensors = {**module._parameters, **module._buffers}
        for key, tensor in tensors.items():
            if tensor is None or tensor.device.type != "meta":
                continue
            name = f"{prefix}{key}"
            if name in packed.plain:
                _set(module, key, packed.tensor(name), tensor, f"{packed.root}: `{name}`")
                used.add(name)
            elif key in module._non_persistent_buffers_set:
                computed.setdefault(path, []).append(key)
            else:
                missing.append(name)
    for path, keys in computed.items():
        missing += [f"{path}.{key}" for key in _compute_buffers(model, model.get_submodule(path), keys)]
    return missing


class PlainLinear(nn.Module):
    """A Linear whose weight stays as it is: activations are brought to its dtype, and results back to theirs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x [.., K] -> [.., N] in the dtype of `x`."""
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, bias).to(x.dtype)


def _keep_precision(model: nn.Module) -> None:
    """Let plain matrices (routers, Linears in fp32) compute in their own precision, whatever the activations are."""
    for path, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        if type(module).forward is nn.Linear.forward:
            model.set_submodule(path, PlainLinear(module))
        else:
            module.register_forward_pre_hook(_to_dtype_of_weight)


def _to_dtype_of_weight(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    assert isinstance(module.weight, torch.Tensor)
    return (arguments[0].to(module.weight.dtype), *arguments[1:])


def _set(module: nn.Module, key: str, value: torch.Tensor, old: torch.Tensor, subject: str) -> None:
    if value.shape != old.shape:
        raise CheckpointError(f"{subject} is {list(value.shape)}, the model needs {list(old.shape)}")
    if key in module._parameters:
        module._parameters[key] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[key] = value


def _compute_buffers(model: Any, module: nn.Module, keys: list[str]) -> list[str]:
    """Compute buffers that lie in no file (rotary frequencies, scales of embeddings) as transformers does.

    Returns:
        Those that stay unknown.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # as transformers marks what it has loaded
    for key in keys:
        old = module._buffers[key]
        assert old is not None
        unset = torch.nan if torch.is_floating_point(old) else UNSET
        module._buffers[key] = torch.full(old.shape, unset, dtype=old.dtype)
    owner: Any = next((part for part in reversed(_owners(model, module)) if hasattr(part, "_init_weights")), model)
    with torch.no_grad():
        owner._init_weights(module)
    return [key for key in keys if _unset(module._buffers[key])]


def _unset(buffer: torch.Tensor | None) -> bool:
    return buffer is None or bool((buffer.isnan() if torch.is_floating_point(buffer) else buffer == UNSET).any())


def _owners(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that `module` lies in, outermost first; each sub-model of transformers has its own initialisation."""
    path = next(name for name, part in model.named_modules() if part is module)
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]


def _keep_dtype_of_activations(model: nn.Module, config: Any) -> None:
    """Let norms whose weight is not in the dtype of the model give activations back in theirs.

    transformers brings weights to the dtype of the model when it loads them, which is never done here. Left alone, a
    norm of queries in fp32 would meet values in bf16, and attention refuses that.
    """
    dtype = getattr(config.get_text_config(), "dtype", None)
    for module in model.modules():
        weight = module._parameters.get("weight")
        if dtype is not None and weight is not None and weight.dim() == 1 and weight.dtype != dtype:
            module.register_forward_hook(_to_dtype_of_input)


def _to_dtype_of_input(_: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
    both = arguments and isinstance(arguments[0], torch.Tensor) and isinstance(result, torch.Tensor)
    return result.to(arguments[0].dtype) if both else result


def _copy_directory(root: Path, save_directory: str | Path, **_: Any) -> None:
    """What `save_pretrained` of a packed model does: copy the packed directory, which is what it is.

    Raises:
        CheckpointError: There is something at `save_directory` already.
    """
    target = Path(save_directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: is there already", hint="name a directory that is empty or not there")
    shutil.copytree(root, target, dirs_exist_ok=True)
