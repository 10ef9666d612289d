"""Every layout, one visible line each."""

from __future__ import annotations

from ..registry import Registry
from .base import Layout

LAYOUTS: Registry[Layout] = Registry("layout", ())
