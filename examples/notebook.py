"""A notebook as a script: the cells of a first session, run from top to bottom with `python examples/notebook.py OUT`.

Editors that know the `# %%` marks show it as a notebook. Every result is an object: nothing is printed to be parsed.
"""

# %% What to convert, and where to
from __future__ import annotations

import sys
from pathlib import Path

import tilewright

source = Path(__file__).parent / "models" / "tiny-qwen3-moe"
out = Path(sys.argv[1] if len(sys.argv) > 1 else "notebook-out")


# %% A progress of one's own: a widget of a notebook or a server's log would do the same
class Percent:
    """Prints each stage once, when it is over."""

    def start(self, stage: str, total: int, done: int = 0, unit: str = "B") -> None:
        self.line, self.total, self.done = stage, total, done

    def advance(self, count: int = 1) -> None:
        self.done += count

    def finish(self) -> None:
        print(f"{self.line}: {100 * self.done // max(self.total, 1)}%")


progress = Percent()

# %% What would become of each tensor? Nothing is written
int4 = tilewright.QuantizeOptions("int4", group_size=32)
run = tilewright.RunOptions(resume=True)  # go on where an earlier session stopped
plan = tilewright.quantize(source, out / "int4", int4, run=run, dry_run=True, progress=progress)
print(plan.summary.table())

# %% Quantize and pack
quantized = tilewright.quantize(source, out / "int4", int4, run=run, progress=progress)
packed = tilewright.pack(out / "int4", out / "packed", run=run, progress=progress)
print(f"{quantized.summary.line()} in {quantized.seconds:.1f} s; packed in {packed.seconds:.1f} s")

# %% Is it as good as int4 allows? The worst five tensors, and every packed layer on the kernels of this machine
found = tilewright.verify(source, out / "packed", tilewright.VerifyOptions("layers"), progress=progress)
print("passed" if found.passed else found.failures())
for tensor in found.tensors[:5]:
    print(tensor.name, f"{tensor.error.relative:.2%}" if tensor.error else tensor.status)
print("worst layer", found.layers[0].name if found.layers else "none")

# %% A refusal is an exception that says what to do
try:
    tilewright.quantize(out / "packed", out / "again", int4, progress=progress)
except tilewright.TilewrightError as error:
    print("refused:", error)
