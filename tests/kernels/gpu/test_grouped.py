from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tilewright.kernels.errors import LayoutError
from tilewright.kernels.formats import INT4_BY_GROUP
from tilewright.kernels.gpu import grouped, reference, support
from tilewright.kernels.layouts.gpu_hopper import GPU_HOPPER_W4
from tilewright.kernels.tensors import QTensor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(
    rows: list[int], n: int, k: int, group: int = 128, per_token: bool = False, magnitude: float = 1.0
) -> Operands:
    """x, tiles, scales, offsets and a_scale for experts with these rows; some weight scales are zero."""
    m, experts = sum(rows), len(rows)
    codes = torch.randint(0, 16, (experts, n, k), dtype=torch.uint8)
    scales = torch.rand(experts, n, k // group) * 0.02 + 0.002
    scales[torch.rand(scales.shape) < 0.05] = 0.0
    packed = GPU_HOPPER_W4.pack(QTensor(INT4_BY_GROUP[group], codes, scales))
    x = torch.randn(m, k) * magnitude
    a_scale = reference.activation_scales(x, "token" if per_token else "tensor", None)
    offsets = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return reference.quantize(x, a_scale), packed["tiles"], packed["scales"], offsets, a_scale


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.cpu().double(), want.cpu().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("per_token", [False, True])
def test_cpu_operator_is_the_reference(group: int, per_token: bool) -> None:
    x, tiles, scales, offsets, a_scale = operands([2, 0, 3], 64, 256, group, per_token)
    got = grouped.w4a8_grouped_mm(x, tiles, scales, offsets, a_scale, group)
    assert (got.dtype, got.shape) == (torch.bfloat16, (5, 64))
    weights = reference.dense(tiles, scales, group, 256)
    for m, e in enumerate([0, 0, 2, 2, 2]):
        want = (x[m].double() @ weights[e].T) * a_scale[m if per_token else 0].double()
        assert torch.equal(got[m], want.to(torch.bfloat16))


def test_operator_passes_opcheck() -> None:
    """All but the schema check, which does arithmetic on the operands, and torch has none for FP8."""
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = operands([1, 2], 64, 128)
    torch.library.opcheck(torch.ops.tilewright.w4a8_grouped_mm.default, args, test_utils=utils)


def test_operator_compiles() -> None:
    args = operands([1, 2], 64, 128)
    compiled = torch.compile(lambda *a: grouped.w4a8_grouped_mm(*a) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*args), grouped.w4a8_grouped_mm(*args) * 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": torch.zeros(4, dtype=torch.int32, device="meta")}, "`offsets` is on meta, x on cpu"),
        ({"x": torch.zeros(5, 192).to(torch.float8_e4m3fn)}, "K = 192 is not a multiple of the group, 128"),
        ({"x": torch.zeros(5, 256)}, "`x` is torch.float32"),
        ({"tiles": torch.zeros(3, 1, 2, 64, 32, dtype=torch.uint8)}, "`tiles`"),
        ({"scales": torch.zeros(3, 4, 64, dtype=torch.bfloat16)}, r"`scales` is .*\[3, 4, 64\]"),
        ({"offsets": torch.zeros(4, dtype=torch.int64)}, "`offsets`"),
        ({"a_scale": torch.ones(2)}, "`a_scale`"),
        ({"group": 16}, "group 16"),
    ],
)
def test_refusals_name_the_operand(change: dict[str, torch.Tensor], words: str) -> None:
    names = ("x", "tiles", "scales", "offsets", "a_scale")
    arguments = dict(zip(names, operands([2, 0, 3], 64, 256), strict=True)) | change
    with pytest.raises(LayoutError, match=words):
        grouped.w4a8_grouped_mm(**arguments)


def run_on_gpu(args: Operands, group: int = 128) -> torch.Tensor:
    """The operator's result; memory that it is likely to reuse is filled with NaN before."""
    device_args = [a.cuda() for a in args]
    poison = torch.full((args[0].shape[0], args[1].shape[1] * 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    del poison
    return grouped.w4a8_grouped_mm(*device_args, group)


ROWS = {
    "one": [1],
    "none": [0, 0, 3],
    "decode": [1, 0, 1, 2, 16, 17, 0, 1],
    "edges": [15, 16, 17, 31, 32, 33, 63, 64, 65],
    "tall": [127, 128, 129, 0, 255, 256, 257],
    "pieces": [79, 80, 81, 95, 96, 97, 143, 144, 145, 159, 161, 191, 193],
    "skewed": [700, 0, 3, 1, 40, 90],
}


@pytest.fixture
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernel have these sizes, whatever the rows."""
    monkeypatch.setattr(grouped.support, "launch_for", lambda rows, experts: request.param)
    grouped.prepared.cache_clear()
    yield
    grouped.prepared.cache_clear()


@needs_gpu
@pytest.mark.parametrize("sizes", [launch for _, launch in support.TUNED], ids=("few", "some", "many"), indirect=True)
@pytest.mark.parametrize(("n", "k", "per_token"), [(320, 640, True), (256, 512, False)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_gpu_agrees_with_float64(rows: list[int], n: int, k: int, per_token: bool, sizes: None) -> None:
    """Any rows with any sizes of the kernel; N fills its last tile or does not."""
    args = operands(rows, n, k, per_token=per_token)
    got = run_on_gpu(args)
    assert torch.isfinite(got).all()
    assert relative_error(got, reference.grouped_mm(*args)) < 2e-3


@needs_gpu
@pytest.mark.parametrize("rows", [ROWS["decode"], ROWS["skewed"]], ids=["decode", "skewed"])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (128, 1152)])
def test_gpu_takes_small_and_odd_weights(rows: list[int], n: int, k: int) -> None:
    args = operands(rows, n, k)
    assert relative_error(run_on_gpu(args), reference.grouped_mm(*args)) < 2e-3


@needs_gpu
def test_gpu_result_does_not_depend_on_the_expected_rows() -> None:
    args = [a.cuda() for a in operands([100, 3, 0, 9], 256, 512)]
    results = [grouped.w4a8_grouped_mm(*args, 128, expected) for expected in (0, 1, 40, 10**6)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.fixture
def no_gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a release of Triton that Gluon was not tested with."""
    monkeypatch.setattr(grouped.support, "gluon_on", lambda device: False)
    grouped.prepared.cache_clear()
    yield
    grouped.prepared.cache_clear()


@needs_gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [ROWS["decode"], ROWS["tall"]], ids=["decode", "tall"])
def test_plain_triton_agrees_with_float64(group: int, rows: list[int], no_gluon: None) -> None:
    args = operands(rows, 192, 128 * 3 + (group if group < 128 else 0), group, per_token=True)
    got = run_on_gpu(args, group)
    assert torch.isfinite(got).all()
    assert relative_error(got, reference.grouped_mm(*args, group)) < 2e-3


@needs_gpu
@pytest.mark.parametrize("magnitude", [1e-6, 1e6])
def test_gpu_results_stay_finite(magnitude: float) -> None:
    args = operands([30, 5], 256, 512, magnitude=magnitude)
    got = run_on_gpu(args)
    assert torch.isfinite(got).all()
    assert relative_error(got, reference.grouped_mm(*args)) < 2e-3


@needs_gpu
def test_gpu_result_of_a_row_does_not_depend_on_its_neighbours() -> None:
    x, tiles, scales, offsets, a_scale = (a.cuda() for a in operands([300], 256, 512))
    whole = grouped.w4a8_grouped_mm(x, tiles, scales, offsets, a_scale)
    for count in (1, 20, 50, 100):
        part = grouped.w4a8_grouped_mm(x[:count], tiles, scales, torch.tensor([0, count]).int().cuda(), a_scale)
        assert torch.equal(part, whole[:count])


@needs_gpu
def test_gpu_repeats_bit_for_bit_and_in_a_graph() -> None:
    args = [a.cuda() for a in operands([40, 0, 130, 7], 256, 512)]
    first = grouped.w4a8_grouped_mm(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grouped.w4a8_grouped_mm(*args)
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, first)
    args[3].copy_(torch.tensor([0, 100, 100, 150, 177]))  # the same graph serves another split of the rows
    graph.replay()
    assert torch.equal(captured, grouped.w4a8_grouped_mm(*args))


@needs_gpu
def test_gpu_takes_no_rows() -> None:
    args = [a.cuda() for a in operands([0, 0], 64, 128)]
    assert grouped.w4a8_grouped_mm(*args).shape == (0, 64)
