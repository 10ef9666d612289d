"""Hub ids, against a local stand-in for the hub: no network."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import huggingface_hub.constants
import pytest

from tilewright.kernels.errors import CheckpointError
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.hub import is_hub_id

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class Hub:
    """Serves a directory as `org/model`, at any revision."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fetched: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:  # noqa: N802
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        if parts[:3] == ["api", "models", "org"] and parts[3] == "model" and parts[-1] in {*COMMITS, *COMMITS.values()}:
            commit = COMMITS.get(parts[-1], parts[-1])
            content = json.dumps(self.listing(commit) if parts[4] == "revision" else self.tree()).encode()
            return self.send(request, content, {"Content-Type": "application/json"}, body=body)
        if parts[:3] == ["org", "model", "resolve"] and (self.root / "/".join(parts[4:])).is_file():
            if body:
                self.fetched.append("/".join(parts[4:]))
            content = (self.root / "/".join(parts[4:])).read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": parts[3]}
            return self.send(request, content, headers, body=body)
        return self.send(request, b"{}", {"X-Error-Code": "RepoNotFound"}, status=404, body=body)

    def files(self) -> list[Path]:
        return [path.relative_to(self.root) for path in sorted(self.root.rglob("*")) if path.is_file()]

    def listing(self, commit: str) -> dict[str, object]:
        return {"id": "org/model", "sha": commit, "siblings": [{"rfilename": str(path)} for path in self.files()]}

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": str(path), "size": (self.root / path).stat().st_size, "oid": "0" * 40}
            for path in self.files()
        ]

    def send(
        self, request: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str], *, body: bool, status: int = 200
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)


@pytest.fixture
def hub(make_source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(make_source(name="remote"))
    endpoint = f"http://127.0.0.1:{hub.server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()  # one that was opened before does not know
    yield hub
    huggingface_hub.close_session()
    hub.server.shutdown()
    hub.server.server_close()


def test_a_hub_id_gives_the_same_as_a_directory(hub: Hub) -> None:
    """needs.md 63: the result does not depend on how the path was given."""
    local = open_checkpoint(hub.root)
    for source in ("org/model", "org/model@v2", "org/model@main"):
        remote = open_checkpoint(source)
        assert remote.files == local.files
        assert remote.config == local.config
        assert remote.side_files == local.side_files
        assert {f: h.digest for f, h in remote.headers.items()} == {f: h.digest for f, h in local.headers.items()}
        assert (remote.root / "tokenizer.json").is_file()
    assert "pytorch_model.bin" not in hub.fetched
    assert COMMITS["v2"] in str(open_checkpoint("org/model@v2").root)


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    for source in ("org/absent", "org/model@v3"):
        with pytest.raises(CheckpointError, match=r"the hub does not give it: .*\nhint: [^\n]*$") as caught:
            open_checkpoint(source)
        assert source in str(caught.value)
        assert len(str(caught.value).splitlines()) == 2


def test_no_hub_at_all(hub: Hub) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(CheckpointError, match="the hub does not give it"):
        open_checkpoint("org/model")


def test_local_paths_win_over_hub_ids(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    hub.root.rename(tmp_path / "org" / "model")
    assert open_checkpoint("org/model").root == Path("org/model")
    assert hub.fetched == []


@pytest.mark.parametrize(("text", "is_id"), [
    ("org/name", True), ("org/name@main", True), ("org/name@refs/pr/1", True), ("a/b/c", False), ("./a/b", False),
    ("/a/b", False), ("name", False), ("../a", False), ("org/name@", False), ("org/na me", False),
])  # fmt: skip
def test_spelling(text: str, is_id: bool) -> None:
    assert is_hub_id(text) == is_id
