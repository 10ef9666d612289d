"""`verify-accuracy`: is the candidate as good as its format allows?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .help import Command, option
from .options import FOLDER, REPORTING, Choice, Least, debug_option, json_option, print_json, progress_for, stacked

BELOW_THRESHOLD = 3
LEVELS = ("weights", "layers", "model")  # as packer.verify.options has them; a test compares

WHAT, SERVED, PASSES = "What is compared", "A running server", "What passes"

what_options = stacked(
    option(
        "--level",
        type=Choice(LEVELS),
        default="weights",
        show_default=True,
        group=WHAT,
        help="weights: every tensor. layers: also every packed layer, run by the kernels of this machine. model: also "
        "both models, on a text.",
    ),
    option(
        "--text", type=FOLDER, metavar="FILE", group=WHAT, help="UTF-8 text that --level model compares the models on."
    ),
    option(
        "--windows",
        type=Least(1),
        default=256,
        show_default=True,
        metavar="N",
        group=WHAT,
        help="Number of passages that are taken from the text, evenly spaced.",
    ),
    option(
        "--window",
        type=Least(2),
        default=128,
        show_default=True,
        metavar="TOKENS",
        group=WHAT,
        help="Length of each passage.",
    ),
    option(
        "--decode-steps",
        type=Least(0),
        default=4,
        show_default=True,
        metavar="N",
        group=WHAT,
        help="Last tokens of each passage that are fed one at a time, as in generation.",
    ),
    option(
        "--split-loss",
        is_flag=True,
        group=WHAT,
        help="For --level model and a packed CANDIDATE: report what its weights cost and what "
        "rounded activations cost, each on its own.",
    ),
    option(
        "--checksums/--no-checksums",
        default=True,
        group=WHAT,
        help="Compare files with the SHA-256 in their manifest.json first.  [default: checksums]",
    ),
)
threshold_options = stacked(
    option(
        "--max-weight-error",
        type=float,
        group=PASSES,
        help="Largest relative error of a tensor.  [default: the bound of its number format]",
    ),
    option(
        "--max-layer-error",
        type=float,
        default=1e-2,
        show_default=True,
        group=PASSES,
        help="Largest relative error of a packed layer's output.",
    ),
    option(
        "--max-kl",
        type=float,
        default=0.02,
        show_default=True,
        group=PASSES,
        help="Largest mean Kullback-Leibler divergence of the models' predictions, in nats per token.",
    ),
)
served_options = stacked(
    option(
        "--served", metavar="URL", group=SERVED, help="Verify a running vLLM or SGLang server in place of CANDIDATE."
    ),
    option("--model", metavar="NAME", group=SERVED, help="Which of the server's models; needed if it has several."),
    option(
        "--choices",
        type=Least(1),
        metavar="N",
        group=SERVED,
        help="Most likely tokens that the server is asked for.  [default: all of a small vocabulary, else 20]",
    ),
)


@click.command(
    "verify-accuracy",
    cls=Command,
    examples=(
        ("verify-accuracy org/model quantized", "every tensor within the bound of its format?"),
        ("verify-accuracy org/model packed --level layers", "and do the kernels compute what they should?"),
        ("verify-accuracy org/model packed --level model --text text.txt --report report.html", "and the whole model?"),
    ),
)
@click.argument("reference")
@click.argument("candidate", required=False)
@what_options
@served_options
@threshold_options
@option("--report", type=FOLDER, metavar="FILE", group=REPORTING, help="Write an HTML page with everything found.")
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
    """Compare CANDIDATE, a quantized or packed model, with REFERENCE, the model that it was made from.

    Both are directories, .safetensors files, or Hugging Face hub ids. The exit code is 3 if CANDIDATE is worse than
    allowed. Whole models are compared with one layer of each in memory at a time. With --served, CANDIDATE is a running
    server, and what it predicts for the text is compared.
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
