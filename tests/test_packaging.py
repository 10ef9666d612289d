"""Wheels and editable installs hold one import name, the native library, and nothing at the top level beside it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tilewright

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation"]
    options = ["--no-deps", "-w", str(out), str(ROOT)]  # over what the editable install has compiled
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
