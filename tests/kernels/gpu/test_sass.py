"""Machine code of the Hopper kernel: nothing touches the registers of a product before the wait that covers it.

The tensor cores read operands and write accumulators after the instruction that starts a product has passed. Every way
from each product through the code is followed to its wait; what is written, and read, on the way is compared with the
product's registers.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tilewright.kernels.gpu import support

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[T\d]+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\d+):")
# Instructions that give no general register a value.
NO_RESULT = (
    "ST", "BAR", "SYNCS", "UTMA", "RED", "BRA", "BRX", "EXIT", "WARP", "NOP", "MEMBAR", "FENCE", "ERRBAR", "CCTL",
    "DEPBAR", "BSYNC", "NANOSLEEP", "YIELD", "UBL",
)  # fmt: skip
NAMES = ("few", "some", "many")  # rows that each line of `support.TUNED` is for
MOST_COMMITS = 8  # groups that may be in flight


@dataclass(frozen=True)
class Instruction:
    op: str
    predicate: str
    arguments: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def product(self) -> bool:
        return self.op.startswith("QGMMA")

    @property
    def commits(self) -> bool:
        return self.product and "gsb0" in self.arguments

    @property
    def written(self) -> set[int]:
        """General registers that get a value."""
        if self.op.startswith(NO_RESULT) or not re.match(
            r"!?U?P[T\d]|R\d", self.arguments[0] if self.arguments else ""
        ):
            return set()
        register = next((a for a in self.arguments[:3] if re.match(r"R\d+", a)), None)
        if register is None:
            return set()
        count = 1
        if self.product:
            count = int(re.match(r"QGMMA\.64x(\d+)x32", self.op)[1]) // 2  # type: ignore[index]
        elif self.op.startswith("LDSM"):
            count = int(self.op[-1]) if self.op[-1].isdigit() else 1
        elif ".128" in self.op:
            count = 4
        elif ".64" in self.op or ".WIDE" in self.op:
            count = 2
        first = int(register[1:].split(".")[0])
        return set(range(first, first + count))

    @property
    def touched(self) -> set[int]:
        """General registers that are written or read, as far as an instruction names them."""
        return self.written | {int(r) for a in self.arguments for r in re.findall(r"\bR(\d+)", a)}


@dataclass(frozen=True)
class Code:
    instructions: list[Instruction]
    labels: dict[str, int]

    def successors(self, k: int) -> Iterator[int]:
        instruction = self.instructions[k]
        yield from (self.labels[target] for target in instruction.targets)
        ends = instruction.op.startswith(("EXIT", "BRX", "BRA")) and not instruction.predicate
        if not ends and k + 1 < len(self.instructions):
            yield k + 1


def parse(listing: str) -> Code:
    code = Code([], {})
    for line in listing.splitlines():
        if match := LABEL.match(line):
            code.labels[match[1]] = len(code.instructions)
        elif match := INSTRUCTION.match(line):
            arguments = tuple(argument.strip() for argument in match[4].split(","))
            targets = tuple(re.findall(r"\.L_x_\d+", match[4]))
            code.instructions.append(Instruction(match[3], match[2] or "", arguments, targets))
    return code


def violations(code: Code) -> list[str]:
    """What touches a product's registers on any way from it to the wait that covers it."""
    found = []
    for k, product in enumerate(code.instructions):
        if not product.product or not re.match(r"R\d+", product.arguments[1]):
            continue
        first = int(product.arguments[1][1:])
        operands, accumulator = set(range(first, first + 4)), product.written
        todo = [(j, int(product.commits)) for j in code.successors(k)]
        seen = set()
        while todo:
            j, commits = todo.pop()
            other = code.instructions[j]
            waits = other.op.startswith("WARPGROUP.DEPBAR") and commits > int(other.arguments[-1], 16)
            if (j, commits) in seen or waits:
                continue
            seen.add((j, commits))
            if commits > MOST_COMMITS or other.op == "EXIT":
                found.append(f"{product} is never waited for")
                break
            if other.written & operands:
                found.append(f"{other} overwrites an operand of {product}")
            if other.touched & accumulator and not (other.product and other.written == accumulator):
                found.append(f"{other} touches the accumulator of {product}")
            todo += [(successor, commits + other.commits) for successor in code.successors(j)]
    return found


LISTING = """
        /*0100*/                   LDSM.16.M88.4 R40, [R2] ;
.L_x_1:
        /*0110*/                   WARPGROUP.ARRIVE ;
        /*0120*/                   QGMMA.64x16x32.F32.E4M3.E4M3 R24, R32, gdesc[UR12], RZ, !UPT ;
        /*0130*/                   QGMMA.64x16x32.F32.E4M3.E4M3 R24, R36, gdesc[UR12], R24, gsb0 ;
        /*0140*/                   LOP3.LUT R44, R45, 0x3, RZ, 0xc0, !PT ;
        /*0150*/               @P0 BRA `(.L_x_2) ;
        /*0160*/                   IMAD R50, R51, R52, RZ ;
.L_x_2:
        /*0170*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0180*/                   FFMA R60, R24, R61, R60 ;
        /*0190*/                   LOP3.LUT R32, R45, 0x3, RZ, 0xc0, !PT ;
        /*01a0*/               @P1 BRA `(.L_x_1) ;
        /*01b0*/                   EXIT ;
"""


def test_checker_accepts_what_waits() -> None:
    assert violations(parse(LISTING)) == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("LOP3.LUT R44,", "LOP3.LUT R34,", "overwrites an operand"),
        ("LOP3.LUT R44,", "LDSM.16.M88.4 R36,", "overwrites an operand"),
        ("IMAD R50,", "IMAD R38,", "overwrites an operand"),
        (
            "R45, 0x3, RZ, 0xc0, !PT ;\n        /*0150*/",
            "R31, 0x3, RZ, 0xc0, !PT ;\n        /*0150*/",
            "touches the acc",
        ),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP", "overwrites an operand"),
        ("gsb0, 0x0", "gsb0, 0x1", "touches the accumulator"),
        (", R24, gsb0", ", R24", "never waited for"),
    ],
)
def test_checker_finds_what_does_not_wait(before: str, after: str, words: str) -> None:
    assert before in LISTING
    assert any(words in violation for violation in violations(parse(LISTING.replace(before, after))))


def machine_code(launch: support.Launch, per_token: bool, directory: Path) -> tuple[str, str]:
    """Listing of the kernel for (N, K) = (4096, 7168), compiled without a GPU, and what the assembler has to say."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    if triton.__version__ not in support.TESTED_TRITON:
        pytest.skip(f"Triton {triton.__version__} has no Gluon kernel here")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_source
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewright.kernels.gpu import gluon_launch

    values = gluon_launch.constants(4096, 56, per_token, launch)
    x, w = gluon_launch.X_LAYOUT, gluon_launch.W_LAYOUT
    signature = {
        "x16": f"tensordesc<fp8e4nv[16, 128],{x!r}>",
        "x64": f"tensordesc<fp8e4nv[64, 128],{x!r}>",
        "w": f"tensordesc<i8[64, 64],{w!r}>",
        "scales": "*bf16",
        "a_scale": "*fp32",
        "out": "*bf16",
        "offsets": "*i32",
        "experts": "i32",
    }
    source = GluonASTSource(
        gluon_launch.w4a8_grouped,
        signature=signature | dict.fromkeys(values, "constexpr"),
        constexprs=values,
        attrs={(i,): [["tt.divisibility", 16]] for i in (3, 5)},
    )
    options = {"num_warps": 4, "maxnreg": launch.max_registers}
    kernel = compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert launch.programs * (kernel.metadata.shared + 1024) <= 228 * 1024
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    (directory / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    (directory / "kernel.ptx").write_text(kernel.asm["ptx"])
    assembler = (tools / "ptxas", "-arch=sm_90a", directory / "kernel.ptx", "-o", directory / "again.cubin")
    listing = subprocess.run([tools / "nvdisasm", "-c", directory / "kernel.cubin"], capture_output=True, check=True)
    said = subprocess.run(assembler, capture_output=True, check=True)
    return listing.stdout.decode(), (said.stdout + said.stderr).decode()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("launch", [launch for _, launch in support.TUNED], ids=NAMES)
def test_registers_of_products_live_until_the_wait(launch: support.Launch, per_token: bool, tmp_path: Path) -> None:
    listing, said = machine_code(launch, per_token, tmp_path)
    code = parse(listing)
    heights = sum(height <= launch.tile_m for height in (16, 32, 64, 80, 96, 128, 144, 160, 192, 256))
    products = sum(instruction.product for instruction in code.instructions)
    assert products >= heights * 2 * launch.blocks * 4
    assert violations(code) == []
    assert not re.search("C75[0-9][0-9]", said), said  # products that the assembler had to serialize
