"""What SGLang's own CPU kernels call the tensors that it packs when it starts; see `engines.parameters`."""

from __future__ import annotations

from ..parameters import SAME, Engine

INT4 = {"weight": "qweight", "weight_zero_point": "qzeros", "weight_scale": "scales"}
SGLANG = Engine("sglang", SAME | {"cpu-vnni-int4": INT4})
