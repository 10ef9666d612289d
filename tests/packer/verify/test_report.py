"""The report holds its JSON, needs nothing from outside, and shows in a browser the figures of that JSON."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.kernels.formats import FP8, INT4_G128, INT8
from tilewright.kernels.tensors import QTensor
from tilewright.packer.verify.distributions import Agreement
from tilewright.packer.verify.histograms import Histogram
from tilewright.packer.verify.options import VerifyOptions
from tilewright.packer.verify.report import render, write_report
from tilewright.packer.verify.results import LayerDrift, LayerResult, ModelResult
from tilewright.packer.verify.verdict import Thresholds, Verification
from tilewright.packer.verify.weight_error import WeightError
from tilewright.packer.verify.weights import TensorResult

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PLACES = (("self_attn.q_proj", "fp8"), ("mlp.experts.0.up_proj", "int4-g128"), ("mlp.experts.1.up_proj", "int4-g128"))
VICTIM = "model.layers.1.self_attn.v_proj.weight"
HOSTILE = "model.layers.0.</script><!--<b>&amp;\"'.weight"


def tensors() -> list[TensorResult]:
    torch.manual_seed(2)
    found = [TensorResult("model.norm.weight", "missing", (4,), note="not in x"), TensorResult(HOSTILE, "equal", (4,))]
    for layer in range(3):
        for module, fmt in PLACES:
            relative, ratio = float(torch.rand(())) / 10, float(torch.rand(()))
            error = WeightError(relative, relative / 3, relative / ratio, ratio, (0, 1))
            found.append(TensorResult(f"model.layers.{layer}.{module}.weight", "ok", (128, 128), fmt, error))
    broken = WeightError(float("nan"), float("nan"), 0.1, float("inf"), (2, 0))
    found.append(TensorResult(VICTIM, "above the bound", (64, 64), "fp8", broken, "bad"))
    return sorted(found, key=lambda result: result.badness, reverse=True)


def histogram(fmt: Any, codes: torch.Tensor) -> Histogram:
    found = Histogram()
    found.add(QTensor(fmt, codes, torch.rand(16, 1) / 100 + 1e-6))
    return found


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    torch.manual_seed(1)
    drift = tuple(LayerDrift(layer, 0.01 * (layer + 1), 1 - 0.001 * layer) for layer in range(3))
    agreement = Agreement(512, 5.5947, 5.6012, 0.000123, 0.25, 0.98765)
    return Verification(
        reference="source",
        candidate="candidate & <co>",
        level="model",
        thresholds=Thresholds(),
        tensors=tensors(),
        histograms={
            "int8": histogram(INT8, torch.randint(-127, 128, (16, 64), dtype=torch.int8)),
            "fp8": histogram(FP8, torch.randn(16, 64).to(torch.float8_e4m3fn)),
            "int4-g128": histogram(INT4_G128, torch.randint(0, 16, (16, 64), dtype=torch.uint8)),
        },
        layers=[LayerResult("model.layers.0.mlp.experts", "int4-g128", "cpu-vnni-int4", "linear_int4", (1, 5), 0.0031)],
        model=ModelResult(4, 128, 2, agreement, agreement, drift),
        notes=("a note",),
        options=VerifyOptions("model", Thresholds(kl=0.5), Path("a text.txt"), windows=4),
    ).to_json()


def embedded(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_page_holds_its_json_and_nothing_from_outside(document: dict[str, Any], tmp_path: Path) -> None:
    page = render(document)
    assert embedded(page) == document
    urls = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert urls == {"http://www.w3.org/2000/svg"}  # the name of a namespace, not an address
    assert not re.search(r"<(?:link|img|iframe)\b|\bsrc=|@import|url\(|\bfetch\(", page)
    write_report(document, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_page_can_be_read_without_a_script(document: dict[str, Any]) -> None:
    (text,) = re.findall(r"<noscript>(.*?)</noscript>", render(document), re.DOTALL)
    assert "FAIL  level model" in text
    assert "candidate &amp; &lt;co&gt;" in text
    assert "KL divergence 0.000123 nats (allowed 0.02)" in text


def test_the_document_says_how_it_was_made(document: dict[str, Any]) -> None:
    assert document["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert document["text"] == "a text.txt"
    assert document["command"] == (
        "verify-accuracy source 'candidate & <co>' --level model --text 'a text.txt' --windows 4 --max-kl 0.5"
    )
    assert VerifyOptions().command("a", "b") == "verify-accuracy a b"


def test_json_has_no_number_that_json_lacks(document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    (broken,) = (t for t in document["weights"]["tensors"] if t["name"].endswith("v_proj.weight"))
    assert broken["relative_error"] is None
    assert broken["ratio"] is None
    assert document["verdict"] == "fail"
    assert len(document["failures"]) == 2


class Page(HTMLParser):
    """Collects what the script drew: figures by path, cells, bars, dots, and the text of the verdict."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.figures: list[tuple[str, str]] = []
        self.cells: list[float] = []
        self.shares: list[float] = []
        self.dots: list[tuple[str, float]] = []
        self.bars: dict[str, list[int]] = {}
        self.verdict = ""
        self._path: str | None = None
        self._histogram = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self._path = found["data-path"] if tag == "span" and "data-path" in found else None
        if found.get("id") == "verdict":
            self._path = "verdict"
        if "data-histogram" in found:
            self._histogram = found["data-histogram"]
        if "data-count" in found:
            self.bars.setdefault(self._histogram, []).append(int(found["data-count"]))
        if "data-error" in found:
            self.cells.append(float(found["data-error"]))
            self.shares.append(float(found["data-share"]))
        if "data-value" in found:
            self.dots.append((found["data-path"], float(found["data-value"])))

    def handle_data(self, data: str) -> None:
        if self._path == "verdict":
            self.verdict = data
        elif self._path:
            self.figures.append((self._path, data))
        self._path = None


def lookup(document: Any, path: str) -> Any:
    for key in path.split("."):
        if key == "length":
            return len(document)
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


@pytest.fixture(scope="module")
def drawn(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Page:
    if CHROMIUM is None:
        pytest.skip("no chromium or chrome here to draw the report with")
    folder = tmp_path_factory.mktemp("browser")
    write_report(document, folder / "report.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile", "--dump-dom"]
    address = (folder / "report.html").as_uri()
    done = subprocess.run([CHROMIUM, *options, address], capture_output=True, timeout=120, check=True)
    return Page(done.stdout.decode())


def test_figures_on_the_page_are_those_of_the_json(document: dict[str, Any], drawn: Page) -> None:
    assert drawn.verdict == "FAIL"
    assert len(drawn.figures) > 60
    for path, text in drawn.figures:
        value = lookup(document, path)
        shown = text.replace(",", "").removesuffix("%")
        if value is None:
            assert text == "–", path
        else:
            expected = 100 * value if text.endswith("%") else value
            assert float(shown) == pytest.approx(expected, rel=6e-3, abs=0.06), path


def test_the_heat_map_shows_the_worst_of_each_module_and_layer(document: dict[str, Any], drawn: Page) -> None:
    worst: dict[tuple[str, int], float] = {}
    for tensor in document["weights"]["tensors"]:
        if tensor["layer"] is not None and (tensor["relative_error"] is not None or tensor["status"] != "equal"):
            place = (tensor["module"], tensor["layer"])
            worst[place] = max(worst.get(place, 0.0), tensor["relative_error"] or 0.0)
    assert len(worst) == 7
    assert all(0 <= share <= 1 for share in drawn.shares)
    assert max(drawn.shares) == 1  # what is above the bound
    assert sorted(drawn.cells) == pytest.approx(sorted(worst.values()))


def test_histograms_and_curves_are_those_of_the_json(document: dict[str, Any], drawn: Page) -> None:
    for name, found in document["weights"]["histograms"].items():
        assert drawn.bars[f"{name}.codes"] == found["codes"]["counts"]
        assert drawn.bars[f"{name}.scales"] == found["scales"]["counts"]
        assert sum(found["codes"]["counts"]) == 16 * 64
        assert sum(found["scales"]["counts"]) == 16
    assert len(drawn.dots) == 6
    for path, value in drawn.dots:
        expected = lookup(document, path)
        assert value == pytest.approx(1 - expected if path.endswith("cosine") else expected)


def test_code_bars_count_values() -> None:
    """Bars are in the order of the values that codes stand for."""
    int8 = histogram(INT8, torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)).to_json(INT8)
    assert int8["codes"] == {
        "labels": [str(value) for value in range(-128, 128, 8)],
        "counts": [1, *14 * [0], 1, 1, *14 * [0], 1],
    }
    fp8 = histogram(FP8, torch.tensor([[-448.0, -0.001, 0.0, 1.0, 448.0]]).to(torch.float8_e4m3fn)).to_json(FP8)
    codes: Any = fp8["codes"]
    found = {label: count for label, count in zip(codes["labels"], codes["counts"], strict=True) if count}
    assert found == {"-2^8": 1, "-< 2^-6": 1, "< 2^-6": 1, "2^0": 1, "2^8": 1}
