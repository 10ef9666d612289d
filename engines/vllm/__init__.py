"""Packed directories served by vLLM.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. What is served is
then chosen by the model alone: `quantization_config.quant_method` of a packed directory is `tilewright`.
"""

from __future__ import annotations

import importlib
import logging

from .version import unsupported

# What registers itself with vLLM when it is imported. vLLM pickles instances of these classes to its other processes.
PARTS = ("config", "loader", "norms", "arguments")


def register() -> None:
    """Make vLLM know packed directories; may be called any number of times.

    A vLLM that this was not written for keeps serving all other models: only a packed one is refused, by
    `version.check`, or by vLLM itself where even registering fails.
    """
    try:
        for part in PARTS:
            importlib.import_module(f"{__name__}.{part}")
    except (ImportError, AttributeError, TypeError) as error:
        reason = unsupported()
        if reason is None:
            raise
        logging.getLogger("vllm.tilewright").error("packed directories cannot be served: %s (%s)", reason, error)
