"""The README's commands run as printed; its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _commands(text: str) -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_readme_commands_run(tmp_path: Path) -> None:
    """All but `make`, which runs this test."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = [line for line in _commands((ROOT / "README.md").read_text()) if not line.startswith("make ")]
    assert len(commands) >= 5
    for command in commands:
        run = subprocess.run(command, shell=True, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True)
        assert run.returncode == 0, f"{command}\n{run.stderr.decode()}"


def test_readme_names_existing_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {line.split()[1] for line in _commands((ROOT / "README.md").read_text()) if line.startswith("make ")}
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing
