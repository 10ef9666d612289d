"""Publish an output on the hub."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from tilewright.kernels.errors import OptionError, PublishError
from tilewright.kernels.packed.manifest import MANIFEST_FILE

from ..progress import Progress, progress_on
from ..publish.card import KEPT_FIELDS, PICTURE_FILE, CardSource, fields_of_source, write_card
from ..publish.contents import CARD_FILE, Contents, read_contents
from ..publish.picture import draw
from ..publish.upload import hub_error, look, plan_upload, upload
from ..records.manifest import manifest_hash

log = logging.getLogger("tilewright")
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class PublishOptions:
    """How an output is published.

    Attributes:
        base_model: Hub id of the model that was converted.
        license: Its license, where its card does not say it.
        verification: What `verify-accuracy --json` printed of this output, as a file.
        private: Make a new repository private.
        revision: The branch to publish on; made if it is not there.
        strict: Refuse what was not verified, failed, or lacks base model or license; otherwise the card says so.
    """

    base_model: str | None = None
    license: str | None = None
    verification: Path | None = None
    private: bool = False
    revision: str = "main"
    strict: bool = False


@dataclass(frozen=True)
class PublishResult:
    """What was published, or would be.

    Attributes:
        repo: The repository.
        sent: Files that were sent, or would be, in that order.
        present: Weight files that were there already.
        removed: Files of an earlier output that went.
        left_out: Files of the directory that stayed here.
        card: The model card.
        notes: What is worth telling.
        dry_run: Whether nothing was sent.
        url: Address of the last commit; None in a dry run.
    """

    repo: str
    sent: tuple[str, ...]
    present: tuple[str, ...]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    card: str
    notes: tuple[str, ...]
    dry_run: bool
    url: str | None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def publish(
    directory: str | Path,
    repo: str,
    options: PublishOptions | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PublishResult:
    """Bring an output to the hub, with a model card; the same call goes on after an interruption.

    Weights go first, in several commits; index, manifest, card and all other files with the last one, so that an
    upload that was cut never looks complete. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        directory: What quantize-model, pack-for-cpu or pack-for-gpu wrote.
        repo: `org/name`; made if it is not there.
        options: What the card says, and where it goes.
        dry_run: List what would go, and send nothing.
        progress: Hears of the bytes sent.

    Raises:
        OptionError: `repo` is no name of a repository.
        PublishError: The directory must not be published, or the hub refused.
    """
    options, root = options or PublishOptions(), Path(directory)
    if not REPO.fullmatch(repo):
        raise OptionError(f"`{repo}` is not `org/name`")
    contents, api = read_contents(root), HfApi()
    verification = _verification(contents, options.verification)
    source = _source(api, root, options)
    notes = _gaps(options, source, verification)
    generated = _generated(contents, repo, source, verification)
    try:
        if not dry_run:
            api.create_repo(repo, private=options.private or None, exist_ok=True)
            if options.revision != "main":
                api.create_branch(repo, branch=options.revision, exist_ok=True)
        plan = plan_upload(contents, generated, look(api, repo, options.revision))
    except (HfHubHTTPError, OSError) as error:
        raise hub_error(repo, error) from error
    message = f"Tilewright {contents.manifest.tool}"
    url = None
    if not dry_run:
        url = upload(api, repo, options.revision, contents, plan, message, progress or progress_on())
    weights = [file.name for group in plan.weights for file in group]
    return PublishResult(
        repo,
        (*weights, *(file.name for file in plan.rest), *plan.generated),
        tuple(file.name for file in plan.present),
        (*plan.unmarks, *plan.removed),
        contents.left_out,
        generated[CARD_FILE].decode(),
        notes,
        dry_run,
        url,
    )


def _verification(contents: Contents, path: Path | None) -> dict[str, Any] | None:
    """The document of a verification of these very bytes."""
    if path is None:
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        of = document["manifest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "write it by `verify-accuracy REFERENCE DIRECTORY --json`"
        raise PublishError(f"{path}: is no verification: {error!r}", hint=hint) from error
    if of != manifest_hash(contents.root):
        hint = f"verify {contents.root} again; what is published has to be what was verified"
        raise PublishError(f"{path}: is the verification of another output, {document.get('candidate')}", hint=hint)
    return document


def _source(api: HfApi, root: Path, options: PublishOptions) -> CardSource:
    """What is known of the source: its card in the directory, else its card on the hub."""
    fields = fields_of_source(root)
    if "license" not in fields and options.license is None and options.base_model:
        try:
            data = api.model_info(options.base_model).card_data
        except (HfHubHTTPError, OSError) as error:
            log.info("%s: the hub does not give its card: %s", options.base_model, str(error).splitlines()[0])
        else:
            known = data.to_dict() if data else {}
            fields = {name: known[name] for name in KEPT_FIELDS if known.get(name)} | fields
    if options.license is not None:
        fields["license"] = options.license
    return CardSource(options.base_model, fields)


def _gaps(options: PublishOptions, source: CardSource, verification: dict[str, Any] | None) -> tuple[str, ...]:
    """What the card cannot say: notes, or with `strict` reasons to refuse."""
    gaps = []
    if verification is None:
        gaps.append("it was not verified: --verification FILE, from `verify-accuracy REFERENCE DIRECTORY --json`")
    elif verification["verdict"] != "pass":
        gaps.append(f"its verification failed: {verification['failures'][0]}")
    if source.base_model is None:
        gaps.append("the model that it was made from is not known: --base-model org/name")
    if "license" not in source.fields:
        gaps.append("the license of its source is not known: --license ID")
    if gaps and options.strict:
        raise PublishError("\n".join(["--strict: the card would be incomplete", *(f"  {gap}" for gap in gaps)]))
    for gap in gaps:
        log.warning("%s", gap)
    return tuple(gaps)


def _generated(
    contents: Contents, repo: str, source: CardSource, verification: dict[str, Any] | None
) -> dict[str, bytes]:
    """Card, picture, and the manifest, which no longer names the source's card."""
    picture = draw(verification) if verification else None
    generated = {PICTURE_FILE: picture.encode()} if picture else {}
    generated[CARD_FILE] = write_card(contents, repo, source, verification, picture is not None).encode()
    if CARD_FILE in contents.manifest.files:
        files = {name: file for name, file in contents.manifest.files.items() if name != CARD_FILE}
        generated[MANIFEST_FILE] = replace(contents.manifest, files=files).to_json()
    return generated
