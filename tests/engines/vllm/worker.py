"""A process that runs vLLM in itself, for one model after the other: importing vLLM takes longer than all they do.

It reads one JSON object a line: `model`, `prompts` (token ids), `arguments` of `vllm.LLM`, `out` (a file for a tensor),
`tokens` to generate; and answers with `text` and `tokens`, or `error`. The tensor is fp64 [T, V], logarithms of the
probabilities of each token after the first of each prompt.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ARGUMENTS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,
    "max_logprobs": -1,
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
}


def hide_vector_units() -> None:
    """Let vLLM take this machine for one with AVX2 alone."""
    import torch

    for module in (torch.cpu, torch._C._cpu):
        for name in dir(module):
            if name.startswith("_is_") and any(unit in name for unit in ("amx", "avx512", "vnni")):
                setattr(module, name, lambda: False)


def answer(request: dict) -> dict:
    """Serve one model."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(model=request["model"], **(ARGUMENTS | request.get("arguments", {})))
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request.get("tokens", 1),
        prompt_logprobs=-1 if request.get("out") else None,
        ignore_eos=True,
    )
    found = llm.generate(request["prompts"], sampling, use_tqdm=False)
    if request.get("out"):
        rows = [row for output in found for row in output.prompt_logprobs[1:]]
        table = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows], dtype=torch.float64)
        torch.save(table, request["out"])
    return {
        "text": [output.outputs[0].text for output in found],
        "tokens": [list(output.outputs[0].token_ids) for output in found],
    }


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to stderr
    if os.environ.get("TILEWRIGHT_ISA") == "avx2":
        hide_vector_units()
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
