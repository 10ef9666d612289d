"""Upload in an order that never looks complete before it is: weights, then all else, in commits that can be resumed.

What a commit has brought stays; so the same call goes on after a cut connection or a kill. A repository that holds an
earlier output loses its index and manifest before the first new weight arrives, and files that are no longer part of it
with the last commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from tilewright.kernels.errors import PublishError
from tilewright.kernels.packed.manifest import MANIFEST_FILE

from ..progress import Progress
from .contents import Contents, PublishedFile

COMMIT_BYTES = 20_000_000_000  # of weights in one commit; what a kill loses at most, beside what the hub has kept
MARKS = (MANIFEST_FILE, "model.safetensors.index.json")  # what makes a directory look complete
OWN = (".safetensors", ".safetensors.index.json")  # files of an earlier output that may be removed


@dataclass(frozen=True)
class Remote:
    """What a branch of a repository holds.

    Attributes:
        exists: Whether there is such a branch.
        hashes: Path -> SHA-256, of files in large file storage.
        names: All paths.
    """

    exists: bool
    hashes: dict[str, str]
    names: frozenset[str]


def look(api: HfApi, repo: str, revision: str) -> Remote:
    """List a branch; nothing if there is none, or no repository."""
    try:
        entries = list(api.list_repo_tree(repo, recursive=True, revision=revision))
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        return Remote(False, {}, frozenset())
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    return Remote(True, {f.path: f.lfs.sha256 for f in files if f.lfs}, frozenset(f.path for f in files))


@dataclass(frozen=True)
class UploadPlan:
    """What an upload does.

    Attributes:
        weights: Shards to send, one tuple for each commit.
        present: Shards that are there already.
        rest: All other files, sent with the last commit.
        generated: Files that are not in the directory -> content; sent with the last commit.
        removed: What the last commit removes.
        unmarks: What a first commit removes, so that new weights never stand beside an old index.
    """

    weights: tuple[tuple[PublishedFile, ...], ...]
    present: tuple[PublishedFile, ...]
    rest: tuple[PublishedFile, ...]
    generated: dict[str, bytes]
    removed: tuple[str, ...]
    unmarks: tuple[str, ...]


def plan_upload(contents: Contents, generated: dict[str, bytes], remote: Remote) -> UploadPlan:
    """Compare an output with what is there."""
    shards = [file for file in contents.files if file.is_shard]
    missing = [file for file in shards if file.sha256 is None or remote.hashes.get(file.name) != file.sha256]
    rest = tuple(file for file in contents.files if not file.is_shard and file.name not in generated)
    ours = {file.name for file in contents.files} | generated.keys()
    removed = tuple(sorted(name for name in remote.names - ours if name.endswith(OWN)))
    unmarks = tuple(name for name in MARKS if missing and name in remote.names)
    weights = tuple(_commits(missing))
    return UploadPlan(
        weights,
        tuple(file for file in shards if file not in missing),
        rest,
        generated,
        tuple(name for name in removed if name not in unmarks),
        unmarks,
    )


def _commits(files: Sequence[PublishedFile]) -> Iterator[tuple[PublishedFile, ...]]:
    group: list[PublishedFile] = []
    for file in files:
        if group and sum(other.size for other in group) + file.size > COMMIT_BYTES:
            yield tuple(group)
            group = []
        group.append(file)
    if group:
        yield tuple(group)


def upload(
    api: HfApi, repo: str, revision: str, contents: Contents, plan: UploadPlan, message: str, progress: Progress
) -> str:
    """Carry the plan out, and give the address of the last commit.

    Raises:
        PublishError: The hub refused, or a file is not what the manifest says; the same call goes on.
    """
    shown = not are_progress_bars_disabled()
    disable_progress_bars()  # the client's: ours tells all of it
    progress.start("publishing", sum(file.size for group in plan.weights for file in group))
    try:
        if plan.unmarks:
            _commit(api, repo, revision, [_gone(name) for name in plan.unmarks], f"{message}: begin")
        for number, group in enumerate(plan.weights, start=1):
            operations = [_addition(contents, file) for file in group]
            for file, operation in zip(group, operations, strict=True):
                api.preupload_lfs_files(repo, additions=[operation], revision=revision)
                _check(contents, file, operation)
                progress.advance(file.size)
            _commit(api, repo, revision, operations, f"{message}: weights, {number} of {len(plan.weights)}")
        last: list[Any] = [_addition(contents, file) for file in plan.rest]
        last += [CommitOperationAdd(name, content) for name, content in plan.generated.items()]
        last += [_gone(name) for name in plan.removed]
        return _commit(api, repo, revision, last, message)
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        raise hub_error(f"{repo}: the upload stopped", error) from error
    finally:
        progress.finish()
        if shown:
            enable_progress_bars()


def hub_error(what: str, error: Exception) -> PublishError:
    """What the hub's client says, in one line."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return PublishError(
        f"{what}: {reason}", hint="check the network, `hf auth login` and your rights; the same command then goes on"
    )


def _addition(contents: Contents, file: PublishedFile) -> CommitOperationAdd:
    return CommitOperationAdd(file.name, contents.root / file.name)


def _gone(name: str) -> CommitOperationDelete:
    return CommitOperationDelete(name)


def _check(contents: Contents, file: PublishedFile, operation: CommitOperationAdd) -> None:
    """The client has hashed what it sent: it has to be what the manifest says, before any commit names it."""
    found = operation.upload_info.sha256.hex()
    if file.sha256 is not None and found != file.sha256:
        raise PublishError(
            f"{contents.root / file.name}: SHA-256 is {found}, the manifest says {file.sha256}",
            hint="the file changed since it was written; convert it again, nothing was published of it",
        )


def _commit(api: HfApi, repo: str, revision: str, operations: Sequence[Any], message: str) -> str:
    return str(api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url)
