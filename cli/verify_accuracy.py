"""`verify-accuracy`: is the candidate as good as its format allows?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .options import FOLDER, Choice, Least, debug_option, json_option, print_json, progress_for, stacked

BELOW_THRESHOLD = 3
LEVELS = ("weights", "layers", "model")  # as packer.verify.options has them; a test compares

what_options = stacked(
    click.option("--level", type=Choice(LEVELS), default="weights", show_default=True, help="How far to go."),
    click.option("--text", type=FOLDER, help="UTF-8 file to compare models on; needed for --level model."),
    click.option("--windows", type=Least(1), default=256, show_default=True, help="Windows out of the text."),
    click.option("--window", type=Least(2), default=128, show_default=True, help="Tokens in each window."),
    click.option("--decode-steps", type=Least(0), default=4, show_default=True, help="Last tokens fed one at a time."),
    click.option(
        "--checksums/--no-checksums", default=True, help="Compare files with their manifest first; done by default."
    ),
)
threshold_options = stacked(
    click.option("--max-weight-error", type=float, help="Relative error of a tensor; its format's bound by default."),
    click.option("--max-layer-error", type=float, default=1e-2, show_default=True, help="Relative error of a layer."),
    click.option("--max-kl", type=float, default=0.02, show_default=True, help="KL divergence in nats per token."),
)
served_options = stacked(
    click.option("--served", metavar="URL", help="Verify a running vLLM or SGLang server in the place of CANDIDATE."),
    click.option("--model", metavar="NAME", help="Which of the server's models; needed if it has several."),
    click.option("--choices", type=Least(1), help="Choices to ask the server for; all of a small vocabulary, else 20."),
)


@click.command("verify-accuracy")
@click.argument("reference")
@click.argument("candidate", required=False)
@what_options
@served_options
@threshold_options
@click.option("--report", type=FOLDER, help="Write a self-contained HTML page.")
@json_option
@debug_option
def verify_accuracy(
    reference: str,
    candidate: str | None,
    served: str | None,
    model: str | None,
    choices: int | None,
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
    tells the SHA-256 must have it. With --served URL, what a running server predicts for the text is compared.
    """
    import tilewright
    from tilewright.packer.verify.summary import summary

    if report and not report.parent.is_dir():
        raise tilewright.OptionError(f"--report {report}: there is no directory {report.parent}")
    thresholds = tilewright.Thresholds(max_weight_error, max_layer_error, max_kl)
    options = tilewright.VerifyOptions(thresholds=thresholds, **what)
    progress = progress_for(as_json)
    if (served is None) == (candidate is None):
        raise tilewright.OptionError("name either CANDIDATE or --served URL")
    if served is None and (model or choices):
        raise tilewright.OptionError("--model and --choices belong to --served URL")
    if served is not None:
        result = tilewright.verify_served(reference, served, options, model=model, choices=choices, progress=progress)
    else:
        result = tilewright.verify(reference, str(candidate), options, progress=progress)
    if report:
        result.write_report(report)
    if as_json:
        print_json(result.to_json())
    else:
        click.echo(summary(result.to_json()))
    if not result.passed:
        sys.exit(BELOW_THRESHOLD)
