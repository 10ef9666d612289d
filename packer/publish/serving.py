"""How each engine that can load an output is told to serve it."""

from __future__ import annotations

VLLM = ("vLLM", "console", "vllm serve {repo}")
SGLANG = ("SGLang", "console", "python -m sglang.launch_server --model-path {repo}")
TRTLLM = ("TensorRT-LLM", "console", "trtllm-serve {repo}")
TRANSFORMERS = (
    "transformers",
    "python",
    'model = transformers.AutoModelForCausalLM.from_pretrained("{repo}", dtype="auto")',
)
TILEWRIGHT = (
    "Tilewright",
    "python",
    "path = huggingface_hub.snapshot_download({quoted})\nmodel = tilewright.load_model(path)",
)

# Scheme and checkpoint format -> engines, as in README.md. Exclusion lists and configs are tested, not every start.
ENGINES: dict[tuple[str, str], tuple[tuple[str, str, str], ...]] = {
    ("block-fp8", "native"): (VLLM, SGLANG, TRANSFORMERS),
    ("block-fp8", "compressed-tensors"): (VLLM,),
    ("int8", "native"): (SGLANG,),
    ("int8", "compressed-tensors"): (VLLM,),
    ("int4", "compressed-tensors"): (VLLM, TRANSFORMERS),
    ("mxfp4", "compressed-tensors"): (VLLM, TRANSFORMERS),
    ("w4afp8", "native"): (SGLANG, TRTLLM),
    ("w4afp8", "compressed-tensors"): (VLLM,),
}


def serving_lines(scheme: str | None, form: str | None, packed: bool, repo: str) -> list[tuple[str, str, str]]:
    """Engine, language of the line, and the line, for each engine that loads the output as it is published."""
    engines = (TILEWRIGHT,) if packed else ENGINES.get((scheme or "", form or ""), ())
    return [(name, language, line.format(repo=repo, quoted=f'"{repo}"')) for name, language, line in engines]
