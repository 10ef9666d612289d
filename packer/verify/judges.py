"""A second opinion on quantized weights: the library that defines a format reads some of them, where it is installed.

Conversion and verification share one reader, so that a mistake of it would pass unseen; these do not use it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernels.formats import FORMATS

from ..checkpoint.declared import quantization_config
from ..checkpoint.encoding import StoredWeight
from ..checkpoint.files import Checkpoint
from ..checkpoint.packed import config_before_packing, stored_inventory
from ..plan import Source
from .weights import TensorResult

SAMPLES = 3  # weights of each encoding that are read: the first, one in the middle, the last
Tensors = Mapping[str, torch.Tensor]
Reading = Callable[[Tensors, Mapping[str, Any], str], torch.Tensor | None]


class ForeignReadingError(Exception):
    """The library does not take the module for a quantized one."""


@dataclass(frozen=True)
class Judge:
    """A library that reads a format of its own.

    Attributes:
        library: Name of its package.
        read: (suffix -> tensor, quantization config, module) -> values [N, K] in fp32, not rounded; None where the
            library has no reading of what the module holds.
    """

    library: str
    read: Reading


def _compressed_tensors(tensors: Tensors, block: Mapping[str, Any], module: str) -> torch.Tensor | None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.utils.match import is_match, match_name

    if "weight_g_idx" in tensors:  # orders of activations are not read there any more
        return None
    parsed = QuantizationConfig.model_validate(block)
    schemes = list(parsed.config_groups.values())
    by_name = [scheme for scheme in schemes if any(match_name(module, target) for target in scheme.targets)]
    linear = torch.nn.Linear(1, 1)
    by_class = [scheme for scheme in schemes if any(is_match("", linear, target) for target in scheme.targets)]
    scheme = next(iter((*by_name, *by_class)), None)
    if scheme is None or scheme.weights is None or any(match_name(module, name) for name in parsed.ignore or ()):
        raise ForeignReadingError("takes it for unquantized")
    form = scheme.format or parsed.format
    state = dict(tensors)
    if "fp4" in form:
        n, half = state["weight_packed"].shape
        codes = unpack_fp4_from_uint8(state["weight_packed"], n, half * 2, torch.float32)
        of_mx = form.startswith("mx")
        scale = decompress_mx_scale(state["weight_scale"]) if of_mx else state["weight_scale"]
        whole = None if of_mx else state["weight_global_scale"]
        values = dequantize(codes, scale.float(), args=scheme.weights, global_scale=whole, dtype=torch.float32)
    else:
        if not form.startswith("mx"):
            state["weight_scale"] = state["weight_scale"].to(torch.float32)  # so that the result is not rounded
        values = BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"]
    found: torch.Tensor = values.to(torch.float32)
    return found


def _mlx(tensors: Tensors, block: Mapping[str, Any], module: str) -> torch.Tensor | None:
    import mlx.core as mx
    import numpy as np

    said = block.get(module, block)
    if said is False:
        raise ForeignReadingError("takes it for unquantized")
    said = block if said is True else said
    words = mx.array(tensors["weight"].numpy())
    scales, biases = (mx.array(tensors[name].float().numpy()) for name in ("scales", "biases"))
    values = mx.dequantize(words, scales, biases, group_size=said["group_size"], bits=said["bits"])
    return torch.from_numpy(np.array(values))


def _bitsandbytes(tensors: Tensors, block: Mapping[str, Any], module: str) -> torch.Tensor | None:
    import bitsandbytes.functional as bnb

    if "SCB" in tensors:
        found: torch.Tensor = bnb.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
        return found
    state = bnb.QuantState.from_dict(
        {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("weight.")}, torch.device("cpu")
    )
    state.dtype = torch.float32
    values: torch.Tensor = bnb.dequantize_4bit(tensors["weight"], state)
    return values


JUDGES = {
    "compressed-tensors": Judge("compressed-tensors", _compressed_tensors),
    "mlx": Judge("mlx", _mlx),
    "bitsandbytes": Judge("bitsandbytes", _bitsandbytes),
}


def second_opinion(checkpoint: Checkpoint) -> tuple[list[TensorResult], list[str]]:
    """Compare some quantized weights of a checkpoint with what the library that defines their format reads.

    Args:
        checkpoint: A directory; of a packed one, what it holds unpacked.

    Returns:
        A failure for each weight that is read differently, and a note on what was compared; nothing where there is
        no such library, or it is not installed.
    """
    block = quantization_config(config_before_packing(checkpoint.config))
    judge = JUDGES.get(str(block.get("quant_method")))
    if judge is None or importlib.util.find_spec(judge.library.replace("-", "_")) is None:
        return [], []
    chosen = list(_chosen(checkpoint))
    failures, compared = [], 0
    for weight in chosen:
        reason = _difference(checkpoint, weight, judge, block)
        compared += reason is not None
        if reason:
            note = f"{judge.library} {reason}; read here as {weight.encoding}"
            failures.append(TensorResult(weight.tensors[0], "differs", weight.shape, note=note))
    version = importlib.metadata.version(judge.library)
    rest = len(chosen) - compared
    silent = f"; of {rest} it gave no reading" if rest else ""
    notes = [f"{checkpoint.root.name}: {compared} quantized weights were read by {judge.library} {version} too{silent}"]
    return failures, notes if chosen else []


def _chosen(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Some matrices of each encoding."""
    kinds: dict[str, list[StoredWeight]] = {}
    for weight in stored_inventory(checkpoint).weights:
        if weight.quantized and len(weight.shape) == 2:
            kinds.setdefault(weight.encoding, []).append(weight)
    for members in kinds.values():
        places = {round(number * (len(members) - 1) / (SAMPLES - 1)) for number in range(SAMPLES)}
        yield from (members[place] for place in sorted(places))


def _difference(checkpoint: Checkpoint, weight: StoredWeight, judge: Judge, block: Mapping[str, Any]) -> str | None:
    """How a library reads a weight otherwise: empty if it does not; None if it has no reading of it."""
    names = (*weight.tensors, *weight.companions)
    stored = {name: checkpoint.tensor(Source(name)) for name in names}
    try:
        found = judge.read(
            {name.removeprefix(f"{weight.module}."): stored[name] for name in names}, block, weight.module
        )
    except ForeignReadingError as error:
        return str(error)
    except Exception:  # whatever a library raises about what it does not read: it gives no opinion
        found = None
    if found is None:
        return None
    tensors = [stored[name] for name in weight.tensors]
    ours = [] if weight.rotation else [weight.decoder.rows(tensors, slice(0, weight.shape[0], 1)).to(torch.float32)]
    if weight.stored_format and (codes := weight.decoder.codes(tensors, FORMATS[weight.stored_format])):
        ours.append(codes.dequantize())
    for name in names:
        checkpoint.forget(Source(name))
    for values in ours:
        if values.shape != found.shape:
            return f"reads {list(found.shape)}, not {list(values.shape)}"
        if not torch.equal(values, found):
            row, column = (values != found).nonzero()[0].tolist()
            return f"reads {float(found[row, column]):g} at [{row}, {column}], not {float(values[row, column]):g}"
    return ""
