"""`verify-accuracy`: is the candidate as good as its format allows?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .options import FOLDER, debug_option, json_option, print_json, stacked

BELOW_THRESHOLD = 3
LEVELS = ("weights", "layers", "model")  # as packer.verify.verdict has them; a test compares

what_options = stacked(
    click.option("--level", type=click.Choice(LEVELS), default="weights", show_default=True, help="How far to go."),
    click.option("--text", type=FOLDER, help="UTF-8 file to compare models on; needed for --level model."),
    click.option("--windows", type=click.IntRange(1), default=256, show_default=True, help="Windows out of the text."),
    click.option("--window", type=click.IntRange(2), default=128, show_default=True, help="Tokens in each window."),
    click.option(
        "--decode-steps", type=click.IntRange(0), default=4, show_default=True, help="Last tokens fed one at a time."
    ),
    click.option(
        "--checksums/--no-checksums", default=True, help="Compare files with their manifest first; done by default."
    ),
)
threshold_options = stacked(
    click.option("--max-weight-error", type=float, help="Relative error of a tensor; its format's bound by default."),
    click.option("--max-layer-error", type=float, default=1e-2, show_default=True, help="Relative error of a layer."),
    click.option("--max-kl", type=float, default=0.02, show_default=True, help="KL divergence in nats per token."),
)


def count(level: str, done: int, total: int) -> None:
    """Keep one line on stderr up to date; silent if stderr is no terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{level}: {done} of {total}" if done < total else "\r\x1b[K", err=True, nl=False)


@click.command("verify-accuracy")
@click.argument("reference")
@click.argument("candidate")
@what_options
@threshold_options
@click.option("--report", type=FOLDER, help="Write a self-contained HTML page.")
@json_option
@debug_option
def verify_accuracy(
    reference: str,
    candidate: str,
    max_weight_error: float | None,
    max_layer_error: float,
    max_kl: float,
    report: Path | None,
    as_json: bool,
    **what: Any,
) -> None:
    """Compare CANDIDATE, quantized or packed, with REFERENCE; exit with 3 if it is worse than allowed.

    Each level includes those before it: weights compares every tensor, layers runs every packed layer by the bundled
    kernels, model runs both models on a text, one layer of each in memory at a time. Files of which a manifest.json
    tells the SHA-256 must have it.
    """
    if what["level"] == "model" and what["text"] is None:
        raise click.UsageError("--level model needs --text FILE")
    if what["decode_steps"] >= what["window"]:
        raise click.UsageError(f"--decode-steps {what['decode_steps']} must be less than --window {what['window']}")
    if report and not report.parent.is_dir():
        raise click.UsageError(f"--report {report}: there is no directory {report.parent}")

    from tilewright.kernels.errors import VerifyError
    from tilewright.packer.verify.job import Request, verify
    from tilewright.packer.verify.report import write_report
    from tilewright.packer.verify.summary import summary
    from tilewright.packer.verify.verdict import Thresholds

    compare_models: Any = None
    if what["level"] == "model":
        try:
            from tilewright.packer.verify.whole_model import compare_directories
        except ModuleNotFoundError as error:
            raise VerifyError(f"--level model needs `{error.name}`", hint="pip install 'tilewright[hf]'") from error
        compare_models = compare_directories
    request = Request(thresholds=Thresholds(max_weight_error, max_layer_error, max_kl), **what)
    document = verify(reference, candidate, request, compare_models, count).to_json()
    if report:
        write_report(document, report)
    if as_json:
        print_json(document)
    else:
        click.echo(summary(document))
    if document["verdict"] == "fail":
        sys.exit(BELOW_THRESHOLD)
