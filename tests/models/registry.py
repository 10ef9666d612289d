"""Every family of the table, each as a tiny config with random weights that transformers itself makes."""

from __future__ import annotations

from dense_families import DENSE
from family import Family
from hybrid_families import HYBRIDS
from moe_families import SPARSE
from vision_families import VISION

FAMILIES: tuple[Family, ...] = (*DENSE, *SPARSE, *HYBRIDS, *VISION)
