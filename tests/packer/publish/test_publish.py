"""Publishing against a stand-in of the hub: order, kills, what is refused, and what must never be seen."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tilewright
from tilewright.kernels.errors import OptionError, PublishError
from tilewright.packer.publish.card import CardSource, write_card
from tilewright.packer.publish.contents import read_contents

REPO = "org/tiny-int8"
TOKEN = "hf_" + "TestTokenOfNobody" * 2


def published(hub: Any, branch: str = "main") -> dict[str, bytes]:
    files: dict[str, bytes] = hub.branches[REPO, branch]
    return files


def assert_never_complete_too_early(files: dict[str, bytes], output: Path) -> None:
    """Where index or manifest lie, all weights lie beside them."""
    if "manifest.json" not in files and "model.safetensors.index.json" not in files:
        return
    for path in output.glob("*.safetensors"):
        assert files[path.name] == path.read_bytes()


def assert_published(files: dict[str, bytes], output: Path) -> None:
    expected = {path.name: path.read_bytes() for path in output.iterdir()}
    assert {name: files.get(name) for name in expected} == expected
    assert files.keys() - expected.keys() <= {"README.md", "accuracy.svg"}
    assert b"# tiny-int8" in files["README.md"]


def test_weights_first_marks_last(hub: Any, publisher: Any, output: Path) -> None:
    assert publisher.run("publish", output, REPO) == 0, publisher.said
    assert_published(published(hub), output)
    commits = [number for number, request in enumerate(hub.requests) if "/commit/" in request]
    shards = len(list(output.glob("*.safetensors")))
    assert shards >= 4
    assert len(commits) >= 3  # two of weights at least, then all else
    uploads = [number for number, request in enumerate(hub.requests) if request.startswith("PUT /lfs/")]
    assert len(uploads) == shards
    assert max(uploads) < commits[-2]

    sent = len(hub.requests)
    assert publisher.run("publish", output, REPO) == 0  # once more: no weight travels again
    assert not [request for request in hub.requests[sent:] if request.startswith("PUT")]


@pytest.mark.slow
def test_killed_at_ten_points_and_resumed(hub: Any, publisher: Any, output: Path) -> None:
    assert publisher.run("publish", output, REPO) == 0
    requests = len(hub.requests)
    points = [(number, served) for number in range(2, requests) for served in (False, True)]
    for number, served in points[:: len(points) // 10 | 1][:10]:
        hub.branches.clear()
        hub.objects.clear()
        hub.requests.clear()

        def kill(at: int, done: bool, point: tuple[int, bool] = (number, served)) -> None:
            if (at, done) == point:
                publisher.kill()

        hub.kill = kill
        assert publisher.run("publish", output, REPO) == -9
        assert_never_complete_too_early(published(hub), output)
        hub.kill = lambda at, done: None
        kept = set(hub.objects)
        hub.requests.clear()
        assert publisher.run("publish", output, REPO) == 0
        assert_published(published(hub), output)
        assert not [oid for oid in kept if f"PUT /lfs/{oid}" in hub.requests]  # nothing travels twice


def test_a_new_output_replaces_an_old_one(hub: Any, publisher: Any, output: Path) -> None:
    hub.branches[REPO, "main"] = {
        "model-00001-of-00009.safetensors": b"old",
        "model.safetensors.index.json": b"{}",
        "manifest.json": b"{}",
        "notes.txt": b"mine",
    }
    seen = []

    def watch(at: int, done: bool) -> None:
        if hub.requests[at].startswith("PUT"):
            seen.append("manifest.json" in published(hub))

    hub.kill = watch
    assert publisher.run("publish", output, REPO) == 0
    assert seen
    assert not any(seen)
    files = dict(published(hub))
    assert files.pop("notes.txt") == b"mine"
    assert_published(files, output)


def test_dry_run_sends_nothing(hub: Any, publisher: Any, output: Path, verification: Path) -> None:
    assert publisher.run("publish", output, REPO, "--dry-run", "--verification", verification) == 0
    assert not hub.branches
    assert not hub.objects
    assert all(request.startswith("GET ") for request in hub.requests)


def test_branch_and_private(hub: Any, publisher: Any, output: Path) -> None:
    assert publisher.run("publish", output, REPO, "--revision", "int8", "--private") == 0
    assert_published(published(hub, "int8"), output)
    assert not published(hub)


def test_card(hub: Any, publisher: Any, output: Path, verification: Path) -> None:
    hub.cards["org/base"] = {"license": "apache-2.0", "language": ["en"], "tags": ["theirs"]}
    options = ("--base-model", "org/base", "--verification", verification, "--strict")
    assert publisher.run("publish", output, REPO, *options) == 0, publisher.said
    files = published(hub)
    card = files["README.md"].decode()
    metadata = card.split("---")[1]
    for line in (
        "base_model: org/base",
        "base_model_relation: quantized",
        "license: apache-2.0",
        "- compressed-tensors",
    ):
        assert line in metadata
    assert "theirs" not in metadata
    assert "vllm serve org/tiny-int8" in card
    assert "quantize-model org/base OUTPUT --scheme int8 --format compressed-tensors" in card
    assert "| 112 | quantized |" in card
    assert "router" in card
    assert "| int8 | 112 | 0.678% |" in card
    assert "![" in card
    assert files["accuracy.svg"].startswith(b"<svg ")
    assert b"mlp.experts.*.down_proj" in files["accuracy.svg"]


def test_the_source_s_card_gives_its_license_and_stays(hub: Any, publisher: Any, output: Path, tmp_path: Path) -> None:
    root = tmp_path / "output"
    shutil.copytree(output, root)
    theirs = b"---\nlicense: mit\ntags: [chat]\n---\n# Their model\n"
    (root / "README.md").write_bytes(theirs)
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["files"]["README.md"] = {"size": len(theirs), "sha256": hashlib.sha256(theirs).hexdigest()}
    (root / "manifest.json").write_text(json.dumps(manifest))
    assert publisher.run("publish", root, REPO) == 0, publisher.said
    files = published(hub)
    assert b"license: mit" in files["README.md"]
    assert b"Their model" not in files["README.md"]
    assert "README.md" not in json.loads(files["manifest.json"])["files"]
    assert (root / "README.md").read_bytes() == theirs


def test_the_token_is_seen_by_the_hub_alone(hub: Any, publisher: Any, output: Path) -> None:
    hub.branches[REPO, "main"] = {}
    assert publisher.run("publish", output, REPO, "--debug") == 0
    assert hub.tokens <= {f"Bearer {TOKEN}", ""}  # none where large files go, to a place that the hub names
    assert f"Bearer {TOKEN}" in hub.tokens
    assert not any(TOKEN.encode() in content for content in published(hub).values())
    assert TOKEN not in "".join(publisher.said)

    def refuse(at: int, done: bool) -> None:
        if "/commit/" in hub.requests[at] and not done:
            raise PermissionError("no right to write")

    hub.branches[REPO, "main"] = {}
    hub.kill = refuse
    assert publisher.run("publish", output, REPO) == 1
    assert "the same command then goes on" in publisher.said[-1]
    assert TOKEN not in "".join(publisher.said)


@pytest.fixture
def damaged(output: Path, tmp_path: Path) -> Path:
    root = tmp_path / "output"
    shutil.copytree(output, root)
    return root


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (".env", b"A=1", "secrets"),
        ("code/id_rsa", b"x", "secrets"),
        ("notes.md", b"use hf_" + b"abcdefgh" * 5, "a token of the Hugging Face hub"),
        ("a.txt", b"-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
    ],
)
def test_secrets_are_refused(damaged: Path, name: str, content: bytes, reason: str) -> None:
    path = damaged / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(PublishError, match=reason) as error:
        read_contents(damaged)
    assert name in str(error.value)
    assert "abcdefgh" not in str(error.value)


def test_links_out_of_the_directory_are_refused(damaged: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("x")
    (damaged / "more.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PublishError, match=r"more\.txt: a link out of the directory"):
        read_contents(damaged)
    (damaged / "more.txt").unlink()
    (damaged / "inside.txt").symlink_to(damaged / "config.json")
    assert "inside.txt" in {file.name for file in read_contents(damaged).files}


def test_what_is_not_finished_or_not_whole_is_refused(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"no manifest\.json of Tilewright"):
        read_contents(tmp_path / "nothing")
    shard = min(damaged.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(PublishError, match=f"{shard.name}: missing"):
        read_contents(damaged)
    shard.write_bytes(content[:-1])
    with pytest.raises(PublishError, match=f"{shard.name}: has [0-9]+ bytes, manifest.json says"):
        read_contents(damaged)
    (damaged / ".tilewright-partial").mkdir()
    with pytest.raises(PublishError, match="unfinished"):
        read_contents(damaged)


def test_a_changed_byte_is_found_before_a_commit_names_it(hub: Any, publisher: Any, damaged: Path) -> None:
    shard = max(damaged.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert publisher.run("publish", damaged, REPO) == 1
    assert any(f"{shard.name}: SHA-256 is" in line for line in publisher.said)
    assert "manifest.json" not in published(hub)
    assert shard.name not in published(hub)


def test_strict_wants_a_verification_of_these_bytes(damaged: Path, verification: Path) -> None:
    with pytest.raises(PublishError, match="it was not verified"):
        tilewright.publish(damaged, REPO, tilewright.PublishOptions("org/base", "mit", strict=True), dry_run=True)
    document = json.loads(verification.read_text())
    failed = damaged.parent / "failed.json"
    failed.write_text(json.dumps(document | {"verdict": "fail", "failures": ["a.weight: worse"]}))
    options = tilewright.PublishOptions("org/base", "mit", failed, strict=True)
    with pytest.raises(PublishError, match=r"its verification failed: a\.weight"):
        tilewright.publish(damaged, REPO, options, dry_run=True)
    failed.write_text(json.dumps(document | {"manifest": "0" * 64}))
    with pytest.raises(PublishError, match="the verification of another output"):
        tilewright.publish(damaged, REPO, options, dry_run=True)
    with pytest.raises(OptionError, match="is not `org/name`"):
        tilewright.publish(damaged, "name")


def test_card_of_a_packed_directory(output: Path, tmp_path: Path) -> None:
    tilewright.pack(output, tmp_path / "packed", tilewright.PackOptions("cpu"), progress=tilewright.Silent())
    contents = read_contents(tmp_path / "packed")
    card = write_card(contents, REPO, CardSource("org/base", {"license": "mit"}), None, False)
    assert "pack-for-cpu SOURCE OUTPUT  # SOURCE: the int8 checkpoint" in card
    assert "tilewright.load_model(path)" in card
    assert "library_name" not in card
    assert "Not verified." in card
