"""A stand-in for the hub's HTTP API, as far as publishing needs it, and a process that publishes to it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import tilewright

MODELS = Path(__file__).parents[3] / "examples" / "models"
TOKEN = "hf_" + "TestTokenOfNobody" * 2
PUBLISHER = """
import os, sys
from tilewright.cli.main import main
import tilewright.packer.jobs.publish, tilewright.packer.publish.upload as upload
upload.COMMIT_BYTES = 1_500_000
for line in sys.stdin:  # one run a line, in a process of its own that has imported everything
    child = os.fork()
    if not child:
        sys.argv = ["tilewright", *eval(line)]
        main()
    print("\\npid", child, file=sys.stderr, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("\\ndone", status, file=sys.stderr, flush=True)
"""


@dataclass
class Hub:
    """What the stand-in holds, and what it does to its clients.

    Attributes:
        branches: (repository, branch) -> path -> content.
        objects: Large files by SHA-256, whether a commit names them or not.
        requests: Method and path of every request that was served.
        tokens: Tokens seen.
        cards: Repository -> metadata of its card, for models that are only looked at.
        kill: Called with the number of each request, and whether it was served already.
    """

    branches: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    kill: Callable[[int, bool], None] = lambda number, served: None
    url: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Serve one request: status, and JSON or an error code of the hub."""
        path = unquote(path)
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            new = (repo, "main") not in self.branches
            self.branches.setdefault((repo, "main"), {})
            return (200 if new else 409), {"url": f"{self.url}/{repo}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.objects[found[1]] = body
            return 200, {}
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._batch(o) for o in json.loads(body)["objects"]]}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            card = self.cards.get(found[1])
            return (200, {"id": found[1], "cardData": card}) if card else (404, "RepoNotFound")
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(tree|preupload|commit|branch)/([^/]+)", path)
        assert found, path
        repo, action, branch = found.groups()
        if action == "branch":
            self.branches.setdefault((repo, branch), dict(self.branches[repo, "main"]))
            return 200, {}
        if (repo, branch) not in self.branches:
            return 404, "RevisionNotFound" if (repo, "main") in self.branches else "RepoNotFound"
        return 200, getattr(self, f"_{action}")(self.branches[repo, branch], body)

    def _batch(self, wanted: dict[str, Any]) -> dict[str, Any]:
        there = wanted["oid"] in self.objects
        upload = {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}
        return {"oid": wanted["oid"], "size": wanted["size"]} | ({} if there else {"actions": upload})

    def _tree(self, files: dict[str, bytes], _: bytes) -> list[dict[str, Any]]:
        entries = []
        for name, content in files.items():
            digest = hashlib.sha256(content).hexdigest()
            lfs = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 130}} if digest in self.objects else {}
            entries.append({"type": "file", "path": name, "size": len(content), "oid": digest[:40]} | lfs)
        return entries

    def _preupload(self, files: dict[str, bytes], body: bytes) -> dict[str, Any]:
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
        }

    def _commit(self, files: dict[str, bytes], body: bytes) -> dict[str, Any]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        return {"commitUrl": f"{self.url}/org/name/commit/1", "commitOid": "1" * 40}


@pytest.fixture
def hub(server: Hub) -> Hub:
    """The stand-in, empty."""
    for held in (server.branches, server.objects, server.requests, server.tokens, server.cards):
        held.clear()
    server.kill = lambda number, served: None
    return server


@pytest.fixture(scope="session")
def server() -> Iterator[Hub]:
    """The stand-in, on a port of this machine."""
    hub = Hub()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                number = len(hub.requests)
                hub.requests.append(f"{self.command} {urlsplit(self.path).path}")
                hub.tokens.add(self.headers.get("Authorization", ""))
                try:
                    hub.kill(number, False)
                    status, answer = hub.answer(self.command, urlsplit(self.path).path, body)
                except PermissionError as error:
                    status, answer = 403, str(error)
                hub.kill(number, True)
            content = json.dumps(answer if status < 400 or status == 409 else {"error": answer}).encode()
            try:
                self.send_response(status)
                if status == 404:
                    self.send_header("X-Error-Code", answer)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # a killed client

        do_GET = do_POST = do_PUT = serve  # noqa: N815  # as http.server names them

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that was killed is no news."""

    server = Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Publisher:
    """Runs `tilewright publish` in processes of their own.

    Attributes:
        process: The process that forks them.
        pid: The one that runs now.
        said: What all of them have said on stderr.
    """

    process: subprocess.Popen[str]
    pid: int = 0
    said: list[str] = field(default_factory=list)

    def run(self, *arguments: object) -> int:
        """One command to its end; its exit code, negative for a signal."""
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        print(repr(list(map(str, arguments))), file=self.process.stdin, flush=True)
        for line in self.process.stderr:
            if line.startswith("pid "):
                self.pid = int(line.split()[1])
            elif line.startswith("done "):
                return int(line.split()[1])
            elif line.strip():
                self.said.append(line)
        raise AssertionError("".join(self.said))

    def kill(self) -> None:
        """Kill the command that runs."""
        os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def publisher(process: subprocess.Popen[str], hub: Hub) -> Publisher:
    """What publishes to it."""
    return Publisher(process)


@pytest.fixture(scope="session")
def process(server: Hub) -> Iterator[subprocess.Popen[str]]:
    """The process that forks publishers."""
    variables = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER],
        env=os.environ | variables,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    yield process
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.close()
    process.stderr.close()
    process.wait()


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model in several shards; no test writes into it."""
    path = tmp_path_factory.mktemp("publish") / "output"
    tilewright.quantize(
        MODELS / "tiny-qwen3-moe",
        path,
        tilewright.QuantizeOptions("int8", "compressed-tensors"),
        run=tilewright.RunOptions(max_shard_size=1_000_000),
        progress=tilewright.Silent(),
    )
    return path


@pytest.fixture(scope="session")
def verification(output: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What verify-accuracy says of it."""
    path = tmp_path_factory.mktemp("verification") / "verification.json"
    found = tilewright.verify(MODELS / "tiny-qwen3-moe", output, progress=tilewright.Silent())
    path.write_text(json.dumps(found.to_json()))
    return path
