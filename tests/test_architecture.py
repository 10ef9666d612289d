"""The rules of docs/architecture.md and CONTRIBUTING.md that a machine can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilewright.kernels import formats as number_formats
from tilewright.kernels.formats import WeightFormat
from tilewright.packer.families import FAMILIES

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "tilewright.kernels": "kernels/python",
    "tilewright.engines": "engines",
    "tilewright.packer": "packer",
    "tilewright.cli": "cli",
}
MAY_IMPORT: dict[str, set[str]] = {
    "tilewright.kernels": set(),
    "tilewright.engines": {"tilewright.kernels"},
    "tilewright.packer": {"tilewright.kernels"},
    "tilewright.cli": {"tilewright.kernels", "tilewright.packer", "tilewright.engines"},
}
TREES = ("packer", "kernels", "engines", "cli", "tests", "examples", "benchmarks", "docs", "release", ".github", ".ci")
FILES = [
    path
    for path in [
        *ROOT.glob("[!.]*.*"),
        ROOT / "Makefile",
        *(path for tree in TREES for path in (ROOT / tree).rglob("*")),
    ]
    if path.is_file() and "__pycache__" not in path.parts
]
SOURCES = [path for path in FILES if path.suffix in {".py", ".cpp", ".h", ".cu"}]
PYTHON = [path for path in SOURCES if path.suffix == ".py"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(tree: ast.AST, module: str) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement below `tree` with the absolute name of what it imports."""
    package = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node, f"{stem}.{alias.name}") for alias in node.names)


def _modules() -> Iterator[tuple[str, str, Path]]:
    """Package, module (an `__init__` counted as a module inside it) and path of every file of the three packages."""
    for package, folder in FOLDERS.items():
        for path in PYTHON:
            if path.is_relative_to(ROOT / folder):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                yield package, ".".join([package, *parts]), path


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring.count("\n")
            assert lines <= 60, f"{node.name} has {lines} lines without its docstring"


def test_imports_run_one_way() -> None:
    wrong = [
        f"{_name(path)} imports {target}"
        for package, module, path in _modules()
        for _, target in _imports(ast.parse(path.read_text()), module)
        for other in FOLDERS
        if (target + ".").startswith(other + ".") and other != package and other not in MAY_IMPORT[package]
    ]
    assert not wrong


def test_own_imports_stand_at_the_top() -> None:
    """Only commands may import our own modules late, so that `--help` does not pay for torch."""
    wrong = [
        f"{_name(path)}:{node.lineno} imports {target} inside {function.name}"
        for package, module, path in _modules()
        if package != "tilewright.cli"
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node, target in _imports(function, module)
        if target.startswith("tilewright.")
    ]
    assert not wrong


def test_no_import_cycles() -> None:
    modules = {module.removesuffix(".__init__"): path for _, module, path in _modules()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        inner = name + ".__init__" if path.name == "__init__.py" else name
        targets = {target for node, target in _imports(ast.parse(path.read_text()), inner) if node.col_offset == 0}
        stems = {target if target in modules else target.rpartition(".")[0] for target in targets}
        graph[name] = {stem for stem in stems if stem in modules and stem != name}
    done: set[str] = set()
    while ready := [name for name, needs in graph.items() if name not in done and needs <= done]:
        done.update(ready)
    assert done == set(graph), f"these import each other in a circle: {sorted(set(graph) - done)}"


# Names that only some models use: of Linears, heads, norms, stacks of experts, MTP layers, counts in config.json.
FAMILY_NAMES = re.compile(
    r"(?:^|[^\w-])(?:\w+_proj|lm_head|embed_tokens|self_attn|\w+_layernorm|block_sparse_moe|mlp\.\w+|nextn|"
    r"num_(?:hidden_layers|attention_heads|key_value_heads|experts|local_experts|nextn\w*)|n_routed_experts|"
    r"kv_lora_rank|qk_nope_head_dim|tie_word_embeddings|hidden_size|head_dim)\b|layers\\\.|\.experts\b(?!:)|experts\\\."
)
FAMILY_PLACES = ("packer/families/", "kernels/python/model_names.py")
MODEL_TYPES = {kind for family in FAMILIES.values() for kind in family.model_types}
SENTENCE = re.compile(r"\w+ \w+ \w|\w+ = $")  # texts for people may name a key of config.json


def _strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every string of a program that is no docstring and no sentence."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and not SENTENCE.search(node.value):
            yield node


def test_names_of_families_stand_in_families() -> None:
    found = [
        f"{_name(path)}:{node.lineno} {node.value!r}"
        for _, _, path in _modules()
        if not _name(path).startswith(FAMILY_PLACES)
        for node in _strings(ast.parse(path.read_text()))
        if FAMILY_NAMES.search(str(node.value)) or node.value in MODEL_TYPES
    ]
    assert not found


def test_the_check_of_family_names_sees_them() -> None:
    code = '"""q_proj"""\nA = "q_proj"\nB = f"{A}.lm_head"\nC = r"layers\\.(\\d+)"\nD = "it says hidden_size"\n'
    code += 'E = r"\\.experts\\."\n'
    found = {node.lineno for node in _strings(ast.parse(code)) if FAMILY_NAMES.search(str(node.value))}
    assert found == {2, 3, 4, 6}


ARITHMETIC = ("kernels/python", "packer/checkpoint/encodings")  # formats, layouts, kernels; how sources store them
DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
OF_FORMATS = {"bits", "code_dtype", "zero_point", "is_floating_point"}


def _asks_for_numbers(node: ast.AST) -> bool:
    """Whether an expression decides by what numbers are: compares, or looks up, a dtype, bits or a format."""
    formats = {name for name in dir(number_formats) if isinstance(getattr(number_formats, name), WeightFormat)}

    def is_one(part: ast.AST) -> bool:
        if isinstance(part, ast.Attribute):
            is_dtype = part.attr in DTYPES and isinstance(part.value, ast.Name) and part.value.id == "torch"
            return is_dtype or part.attr in OF_FORMATS
        return isinstance(part, ast.Name) and part.id in formats

    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(is_one(part) for side in sides for part in [side, *getattr(side, "elts", [])])
    if isinstance(node, ast.Dict):
        return any(is_one(key) for key in node.keys if key is not None)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return is_one(node.test)
    return isinstance(node, ast.MatchValue) and is_one(node.value)


def test_formats_own_their_arithmetic() -> None:
    wrong = [
        f"{_name(path)}:{node.lineno} {ast.unparse(node).splitlines()[0]}"
        for path in PYTHON
        if any(path.is_relative_to(ROOT / folder) for folder in FOLDERS.values())
        if not any(path.is_relative_to(ROOT / room) for room in ARITHMETIC)
        for node in ast.walk(ast.parse(path.read_text()))
        if _asks_for_numbers(node)
    ]
    assert not wrong, "ask the format (kernels/python/formats), the layout or the reader instead"


@pytest.mark.parametrize(
    "code",
    ["x.dtype == torch.int8", "x.dtype in (torch.int8, torch.uint8)", "fmt.bits == 4", "fmt is FP8", "fmt != INT8"]
    + ["{torch.int8: 1}[x.dtype]", "1 if fmt.code_dtype.is_floating_point else 2", "FP8 == fmt"],
)
def test_branches_on_numbers_are_seen(code: str) -> None:
    assert any(map(_asks_for_numbers, ast.walk(ast.parse(code))))


def test_nothing_names_a_machine_or_a_registry() -> None:
    pattern = re.compile(r"(^|[^\w.])/(w[o]rk|r[o]ot|h[o]me)/\w|p[y]pi[.]org|python[h]osted|npm[j]s|debian[.]org")
    found = [
        f"{_name(path)}:{number}"
        for path in FILES
        if path != Path(__file__) and path.suffix not in {".safetensors", ".png"}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found
