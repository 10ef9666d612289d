"""What vLLM's own CPU kernels call the tensors that it packs when it starts; see `engines.parameters`."""

from __future__ import annotations

from ..parameters import SAME, Engine

INT4 = {"weight": "weight_packed", "weight_zero_point": "weight_zero_point", "weight_scale": "weight_scale"}
VLLM = Engine("vllm", SAME | {"cpu-vnni-int4": INT4})
