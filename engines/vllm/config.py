"""The quantization config of packed directories: which module of theirs runs which layer of vLLM's model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.model_names import HEAD, KV_B, TIED
from tilewright.kernels.modules import PackedLinear, PackedStack
from tilewright.kernels.packed.directory import PackedCheckpoint
from tilewright.kernels.packed.module_spec import QUANT_METHOD

from .experts import PackedExpertsMethod
from .head import PackedHeadMethod, PlainEmbeddingMethod
from .linear import PackedLinearMethod, PlainLinearMethod
from .rank import open_rank
from .version import check

# Layers whose matrix vLLM computes with: latent attention makes its absorbed matrices of this one.
COMPUTED_WITH = (KV_B,)


@register_quantization_config(QUANT_METHOD)
class TilewrightConfig(QuantizationConfig):
    """`quantization_config` of a packed directory.

    Args:
        fields: What config.json says.

    Attributes:
        model: Path or hub id of the packed directory; told by vLLM once its own config is made.
        used: Stored packed modules that a layer of the model runs.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.fields = fields
        self.model = ""
        self.revision: str | None = None
        self.used: set[str] = set()
        self._rename: Any = None
        self._names: dict[str, str] = {}

    @classmethod
    def get_name(cls) -> str:
        """The `quant_method` that selects it."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """What the kernels take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU is needed; kernels for GPUs check what they run on."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TilewrightConfig:
        """Made of `quantization_config`."""
        check()
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Told where the model is."""
        self.model, self.revision = model_name, revision

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Told how vLLM's names of modules differ from those of the checkpoint."""
        rename = copy.copy(hf_to_vllm_mapper)
        rename.orig_to_new_stacked = {}  # packed modules are joined already
        self._rename = rename
        self._names = {}

    def renamed(self, name: str) -> str:
        """The name in vLLM's model of what the checkpoint calls `name`; "" for what the model leaves out."""
        if self._rename is None:
            return name
        result: str | None = self._rename.map_name(name)
        return result or ""

    def packed(self) -> PackedCheckpoint:
        """The share of this process."""
        config = get_current_vllm_config()
        return open_rank(self.model, self.revision, config, config.device_config.device_type)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """What runs a layer; None leaves it to vLLM."""
        packed = self.packed()
        if isinstance(layer, RoutedExperts):
            return self._experts(packed, layer, prefix)
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            tied = packed.config.get(TIED) and HEAD in packed
            head = self._take(packed, [HEAD]) if tied else [None]
            return PlainEmbeddingMethod(head[0])
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        if parts := self._parts(packed, prefix):
            modules = self._take(packed, parts)
            if isinstance(layer, ParallelLMHead):
                return PackedHeadMethod(modules)
            kind = PlainLinearMethod if prefix.rpartition(".")[2] in COMPUTED_WITH else PackedLinearMethod
            return kind(modules)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def _experts(self, packed: PackedCheckpoint, layer: Any, prefix: str) -> PackedExpertsMethod | None:
        name = prefix.removesuffix(".routed_experts")
        stacks = [self._find(packed, f"{name}.{kind}") for kind in ("w13", "w2")]
        if stacks == [None, None]:
            return None
        if None in stacks:
            raise CheckpointError(f"{packed.root}: `{name}`: w13 and w2 are not both stacks of experts")
        w13, w2 = (packed[str(stack)] for stack in stacks)
        assert isinstance(w13, PackedStack)
        assert isinstance(w2, PackedStack)
        self.used.update(map(str, stacks))
        return PackedExpertsMethod(layer, name, w13, w2)

    def _take(self, packed: PackedCheckpoint, names: list[str]) -> list[PackedLinear]:
        modules = [packed[name] for name in names]
        for name, module in zip(names, modules, strict=True):
            if not isinstance(module, PackedLinear):
                raise CheckpointError(f"{packed.root}: `{name}` is a stack of experts, in vLLM's model it is a Linear")
            self.used.add(packed.joined.get(name, name))
        return modules  # type: ignore[return-value]  # checked above

    def _parts(self, packed: PackedCheckpoint, prefix: str) -> list[str]:
        """Packed modules whose results, one behind the other, are a layer's; empty if it is not packed."""
        if whole := self._find(packed, prefix):
            return [whole]
        path, _, own = prefix.rpartition(".")
        wanted = [f"{path}.{part}" for part in self.packed_modules_mapping.get(own, [])]
        found = {name: self._find(packed, name) for name in wanted}
        if not any(found.values()):
            return []
        if missing := [name for name, module in found.items() if module is None]:
            raise CheckpointError(
                f"{packed.root}: vLLM runs {', '.join(wanted)} as one, but {', '.join(missing)} is not packed",
                hint="pack all of them in one kind: leave such Linears out of --exclude together",
            )
        return [str(module) for module in found.values()]

    def _find(self, packed: PackedCheckpoint, name: str) -> str | None:
        """The packed module of a layer that vLLM calls `name`."""
        if not self._names:
            self._names = {self.renamed(module): module for module in [*packed.specs, *packed.joined]}
        return self._names.get(name)
