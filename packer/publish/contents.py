"""Which files of an output go to the hub, and what forbids to publish it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tilewright.kernels.errors import PublishError
from tilewright.kernels.packed.manifest import MANIFEST_FILE, Manifest, difference, read_manifest

from ..records.journal import PARTIAL

CARD_FILE = "README.md"  # of the source, where there is one; the card of the output takes its place
SECRET_NAMES = re.compile(
    r"\.env(\..*)?|\.netrc|\.git-credentials|\.pypirc|\.npmrc|id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|keystore)"
    r"|(token|credentials|secrets?)(\.(json|txt|ya?ml|toml|ini))?"
)
SECRET_TEXTS = {
    "a token of the Hugging Face hub": re.compile(rb"\bhf_[A-Za-z0-9]{30,}"),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "an access key of a cloud": re.compile(rb"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(rb"\b(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})"),
}
SEARCHED = 64 << 20  # bytes; larger files are vocabularies and pictures


@dataclass(frozen=True)
class PublishedFile:
    """One file that goes to the hub.

    Attributes:
        name: Its path in the repository.
        size: Bytes.
        sha256: What the manifest says of it; None for files that it does not name.
    """

    name: str
    size: int
    sha256: str | None

    @property
    def is_shard(self) -> bool:
        """Whether it holds weights."""
        return self.name.endswith(".safetensors")


@dataclass(frozen=True)
class Contents:
    """A finished output, as it goes to the hub.

    Attributes:
        root: The directory.
        manifest: Its manifest.
        files: All files but the card, sorted by name.
        left_out: Files that stay here: hidden ones, and the source's card.
    """

    root: Path
    manifest: Manifest
    files: tuple[PublishedFile, ...]
    left_out: tuple[str, ...]


def read_contents(root: Path) -> Contents:
    """List what goes, from names and sizes; weights are not read.

    Raises:
        PublishError: Something must not be published; all reasons are in the message.
    """
    manifest = read_manifest(root)
    if (root / PARTIAL).exists():
        raise PublishError(f"{root}: an unfinished output", hint="finish it with --resume of the command that began it")
    if manifest is None:
        hint = "publish what quantize-model, pack-for-cpu or pack-for-gpu has finished"
        raise PublishError(f"{root}: there is no {MANIFEST_FILE} of Tilewright", hint=hint)
    stated = manifest.files
    files, left, problems = [], [], []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
            problems.append(f"{name}: a link out of the directory, to {path.resolve()}")
        elif not path.is_file():
            continue
        elif reason := _secret(path):
            problems.append(f"{name}: {reason}")
        elif name == CARD_FILE or any(part.startswith(".") for part in Path(name).parts):
            left.append(name)
        else:
            files.append(PublishedFile(name, path.stat().st_size, stated[name].sha256 if name in stated else None))
            if name in stated and (damage := difference(path, stated[name], checksum=False)):
                problems.append(f"{name}: {damage}")
    names = {file.name for file in files} | {CARD_FILE}
    problems += [f"{name}: missing, the manifest names it" for name in stated if name not in names]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        hint = "remove what does not belong there, restore what is missing"
        raise PublishError(f"{root}: cannot be published as it is\n{lines}", hint=hint)
    return Contents(root, manifest, tuple(files), tuple(left))


def _secret(path: Path) -> str | None:
    """What looks like a secret in a file; never the secret itself."""
    if SECRET_NAMES.fullmatch(path.name):
        return "a file of this name holds secrets"
    if path.suffix == ".safetensors" or path.stat().st_size > SEARCHED:
        return None
    content = path.read_bytes()
    return next((f"holds {what}" for what, text in SECRET_TEXTS.items() if text.search(content)), None)
