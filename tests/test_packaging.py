"""What is released: wheels and sdists that hold what they should and nothing else, and install anywhere."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tilewright

ROOT = Path(__file__).parent.parent


def release_module(name: str) -> ModuleType:
    """A module of release/, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def build_folder() -> Iterator[None]:
    """Processes that share the tests take turns in the build folder of the editable install."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation"]
    options = ["--no-deps", "-w", str(out), str(ROOT)]  # over what the editable install has compiled
    with build_folder():
        subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return next(out.glob("*.whl"))


def test_wheel_serves_every_python(wheel: Path) -> None:
    assert wheel.name.startswith(f"tilewright-{tilewright.__version__}-py3-none-")


def test_wheel_holds_one_import_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"tilewright", f"tilewright-{tilewright.__version__}.dist-info"}
    for folder, source in (
        ("kernels", "kernels/python"),
        ("packer", "packer"),
        ("engines", "engines"),
        ("cli", "cli"),
    ):
        modules = {str(path.relative_to(ROOT / source)) for path in (ROOT / source).rglob("*.py")}
        assert modules <= {name.removeprefix(f"tilewright/{folder}/") for name in names}
    assert "tilewright/kernels/_C.so" in names
    assert "tilewright/py.typed" in names


def test_wheel_runs_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # an editable install of these sources would be found first
    path = f"sys.path.insert(0, {str(site)!r})"
    finders = "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in type(finder).__module__]"
    code = "import tilewright; from tilewright.kernels import ops; print(tilewright.__file__); print(ops.isa())"
    command = [sys.executable, "-c", f"import sys; {path}; {finders}; {code}"]
    out = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert Path(out[0]).is_relative_to(site)
    assert out[1]


def test_installed_distribution_adds_nothing_else_at_the_top() -> None:
    files = importlib.metadata.files("tilewright")
    assert files is not None
    tops = {file.parts[0].removesuffix(".py").removesuffix(".pth") for file in files if file.parts[0] != ".."}
    assert not tops & {"kernels", "cli", "packer", "tests", "examples"}
    assert any(name.startswith("tilewright-") for name in tops)


def test_sdist_holds_what_a_build_needs_and_little_more(tmp_path: Path) -> None:
    code = "import sys, tilewright_build; tilewright_build.build_sdist(sys.argv[1])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "release")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    (path,) = tmp_path.glob("*.tar.gz")
    assert path.name == f"tilewright-{tilewright.__version__}.tar.gz"
    assert path.stat().st_size < 2 << 20
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "kernels" / "csrc").rglob("*") if file.is_file()}
    sources |= {str(file.relative_to(ROOT)) for file in (ROOT / "release").iterdir() if file.is_file()}
    for folder, source in (("kernels", "kernels/python"), ("packer", "packer"), ("cli", "cli"), ("engines", "engines")):
        modules = (file.relative_to(ROOT / source) for file in (ROOT / source).rglob("*.py"))
        sources |= {f"src/tilewright/{folder}/{module}" for module in modules}
    assert {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", *sources} <= names
    assert {name.partition("/")[0] for name in names}.isdisjoint({"tests", "examples", "benchmarks", "docs", "packer"})


def test_a_build_asks_for_torch_only_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = release_module("tilewright_build")
    hooks = (build.get_requires_for_build_wheel, build.get_requires_for_build_editable)
    assert all("torch>=2.10" not in hook() for hook in hooks)

    # Under pip's isolation torch cannot be imported, and sysconfig still names the environment.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert all("torch>=2.10" in hook() for hook in hooks)
    (tmp_path / "torch").mkdir()  # one from before the stable ABI
    assert all("torch>=2.10" in hook() for hook in hooks)
    header = tmp_path / "torch" / "include" / "torch" / "csrc" / "stable" / "library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    assert all("torch>=2.10" not in hook() for hook in hooks)

    # Other tools build in an environment of their own, where the torch that they were asked for can be imported.
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "other"))
    assert all("torch>=2.10" in hook() for hook in hooks)
    found = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert all("torch>=2.10" not in hook() for hook in hooks)


def test_readme_of_the_package_index_has_no_relative_link(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        metadata = files.read(f"tilewright-{tilewright.__version__}.dist-info/METADATA").decode()
    assert "Description-Content-Type: text/markdown" in metadata
    readme = release_module("pypi_readme")
    text = "See [a](docs/a.md#b), ![c](docs/c.png), [d](https://example.org) and [e](#e)."
    at = readme.REPOSITORY
    wanted = (
        f"See [a]({at}/blob/main/docs/a.md#b), ![c]({at}/raw/main/docs/c.png), [d](https://example.org) and [e](#e)."
    )
    assert readme.with_absolute_links(text) == wanted
    assert not readme.RELATIVE.search(metadata)
    assert at in metadata


def test_library_links_for_old_systems(tmp_path: Path) -> None:
    """The objects of the editable install, linked as for manylinux_2_28, reference nothing newer, and run."""
    build = next(iter((ROOT / "build").glob("py3-*")), None)
    found = build.rglob("*.o") if build else []  # also those of sources that are gone
    objects = sorted(
        str(path) for path in found if (ROOT / str(path).partition(".dir/")[2].removesuffix(".o")).exists()
    )
    compiler = shutil.which("g++")
    if not (objects and compiler and shutil.which("objdump")):
        pytest.skip("needs g++, objdump and an editable install of this tree")
    library = tmp_path / "_C.so"
    sources = [str(ROOT / "release" / "glibc_2_28.cpp"), f"-Wl,--version-script={ROOT / 'release' / 'hidden.map'}"]
    torch_library = f"-L{Path(torch.__file__).parent / 'lib'}"
    command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-o", str(library), *sources, *objects]
    with build_folder():
        subprocess.run([*command, torch_library, "-ltorch_cpu"], check=True, capture_output=True, text=True)
    symbols = subprocess.run(["objdump", "-T", str(library)], check=True, capture_output=True, text=True).stdout
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}  # of manylinux_2_28
    for name, version in re.findall(r"\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)", symbols):
        assert tuple(map(int, version.split("."))) <= newest[name], f"{name}_{version}"
    defined = [line for line in symbols.splitlines() if re.match(r"[0-9a-f]{16} ", line) and "*UND*" not in line]
    assert not defined
    code = f"import torch; torch.ops.load_library({str(library)!r}); print(torch.ops.tilewright.isa_report())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "portable" in done.stdout
