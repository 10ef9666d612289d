"""The same random inputs in every run, and the shipped tiny models, quantized and packed once per run.

`pytest --hypothesis-seed=N` draws other inputs than the usual ones, for hypothesis and for torch.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tilewright.kernels import ops
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

MODELS = Path(__file__).parent.parent / "examples" / "models"
ISAS = [status.name for status in ops.kernel_report() if status.available]
SLOW = (  # beginnings of test ids that take more than about two seconds of CPU time, all parameters together
    "tests/cli/test_main.py::test_a_full_disk_behind_stdout_is_no_bug",
    "tests/cli/test_verify_accuracy.py",
    "tests/engines/test_pack_once.py",
    "tests/engines/test_vocabulary.py::test_ranks_together_are_the_head",
    "tests/engines/transformers/test_attention.py::test_compiles",
    "tests/engines/transformers/test_attention.py::test_decode_steps_are_run_by_attend_with_the_numbers_of_sdpa",
    "tests/engines/transformers/test_attention.py::test_windows_chunks_and_selected_keys_are_kept",
    "tests/engines/transformers/test_families.py",
    "tests/engines/transformers/test_gpt_oss.py::test_logits_and_text_are_those_of_transformers",
    "tests/engines/transformers/test_model.py",
    "tests/engines/transformers/test_quantizer.py",
    "tests/engines/vllm/",
    "tests/examples/",
    "tests/kernels/gpu/test_moe.py::test_cpu_operator_is_the_reference",
    "tests/kernels/ops/test_activation_groups.py::test_experts",
    "tests/kernels/ops/test_activation_groups.py::test_long_and_many",
    "tests/kernels/ops/test_activation_groups.py::test_odd_sizes",
    "tests/kernels/ops/test_attention.py::test_numbers_are_those_of_float64_and_bits_those_of_portable_code",
    "tests/kernels/ops/test_bmm.py::test_equal_to_linear",
    "tests/kernels/ops/test_convert.py::test_every_quotient_rounds_like_torch",
    "tests/kernels/ops/test_convert.py::test_odd_widths",
    "tests/kernels/ops/test_convert.py::test_packed_words_byte_by_byte",
    "tests/kernels/ops/test_convert.py::test_same_bits_as_the_formulas",
    "tests/kernels/ops/test_convert.py::test_scale_codes",
    "tests/kernels/ops/test_experts.py::test_a_token_does_not_depend_on_the_batch_or_the_threads",
    "tests/kernels/ops/test_experts.py::test_any_routing",
    "tests/kernels/ops/test_experts.py::test_odd_sizes",
    "tests/kernels/ops/test_experts.py::test_shared_expert",
    "tests/kernels/ops/test_experts_torch.py::test_opcheck_of_the_shared_expert",
    "tests/kernels/ops/test_linear.py::test_odd_sizes",
    "tests/kernels/test_native.py::test_environment_cannot_raise_the_choice",
    "tests/kernels/test_native.py::test_environment_lowers_the_choice",
    "tests/kernels/test_native.py::test_scratch_memory_goes_back_and_comes_again",
    "tests/kernels/test_sanitizers.py",
    "tests/kernels/test_threads.py::test_a_planted_race_is_seen",
    "tests/kernels/test_threads.py::test_no_race_and_the_same_bits_on_several_threads",
    "tests/packer/calibrate/test_conversion.py::test_gptq_comes_closer_to_the_source",
    "tests/packer/calibrate/test_fold.py",
    "tests/packer/calibrate/test_observe.py",
    "tests/packer/engine/test_resources.py",
    "tests/packer/engine/test_resume.py",
    "tests/packer/pack/test_joined.py::test_ranks_joined_equal_uncut",
    "tests/packer/pack/test_odd_widths.py::test_what_is_listed_packs_and_is_the_whole",
    "tests/packer/pack/test_pack.py::test_no_code_changes",
    "tests/packer/pack/test_sharding.py::test_ranks_joined_equal_the_uncut_layer",
    "tests/packer/pack/test_sharding.py::test_shares_keep_the_scales_of_the_whole",
    "tests/packer/pack/test_unpack.py::test_round_trip",
    "tests/packer/quant_config/test_exclusions.py::test_engines_agree_with_what_we_write",
    "tests/packer/quantize/test_any_source.py",
    "tests/packer/quantize/test_frozen.py::test_bytes_are_frozen",
    "tests/packer/quantize/test_needs_experts.py::test_row_37_the_config_states_the_group",
    "tests/packer/quantize/test_needs_experts.py::test_row_54_the_list_never_holds_what_is_quantized",
    "tests/packer/quantize/test_needs_experts.py::test_rows_50_to_52_no_expert_is_left_out",
    "tests/packer/quantize/test_needs_scales.py::test_row_35_values_are_scaled_once",
    "tests/packer/quantize/test_oracles.py",
    "tests/packer/quantize/test_quantize.py::test_every_weight_is_inside_the_bound",
    "tests/packer/quantize/test_rotated_inputs.py::test_compressed_tensors_computes_the_function_of_the_source",
    "tests/packer/quantize/test_sources.py::test_our_own_outputs_are_sources",
    "tests/packer/quantize/test_sources.py::test_scale_dtypes_and_names_of_block_fp8",
    "tests/packer/quantize/test_stacks.py::test_every_order_equals_separate",
    "tests/packer/quantize/test_stacks.py::test_families_know_their_order",
    "tests/packer/quantized_sources/test_exact.py::test_values",
    "tests/packer/quantized_sources/test_gguf.py::test_every_type_is_read_as_its_library_reads_it",
    "tests/packer/quantized_sources/test_mutations.py::test_nothing_is_read_differently_in_silence",
    "tests/packer/repair/test_repair.py::test_damage_is_found_and_mended",
    "tests/packer/solvers/test_gptq.py::test_columns_without_input_are_rounded_to_nearest",
    "tests/packer/solvers/test_gptq.py::test_it_is_the_textbook_algorithm",
    "tests/packer/solvers/test_gptq.py::test_outputs_change_less_than_by_rounding_to_nearest",
    "tests/packer/solvers/test_solvers.py::test_mse_is_never_worse_and_much_better_at_int4",
    "tests/packer/solvers/test_solvers.py::test_rtn_is_the_formula_block_by_block",
    "tests/packer/verify/test_directory.py::test_damage_is_found_under_its_name",
    "tests/packer/verify/test_directory.py::test_every_form_is_sound",
    "tests/packer/verify/test_layers.py::test_every_packed_layer_runs_and_agrees",
    "tests/packer/verify/test_model.py",
    "tests/packer/verify/test_weights.py::test_nearest_rounding_is_sound",
    "tests/packer/verify/test_whole_model.py",
    "tests/test_demo.py",
    "tests/test_packaging.py::test_library_links_for_old_systems",
    "tests/test_packaging.py::test_wheel_runs_away_from_the_sources",
    "tests/test_readme.py::test_links_lead_somewhere",
    "tests/test_readme.py::test_readme_commands_run",
    "tests/test_readme.py::test_readme_names_existing_targets",
)
NOT_CHECKED = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


def pytest_configure(config: pytest.Config) -> None:
    """A machine may be as slow as it likes, and a run finds what the one before it found.

    Processes that share the tests (pytest -n) share the CPUs, too; each has at least one for itself.
    """
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the commands that a test starts
    usual = config.getoption("hypothesis_seed") is None
    settings.register_profile("repeatable", deadline=None, derandomize=usual, suppress_health_check=NOT_CHECKED)
    settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that measure memory take turns, and so do those that need a GPU; slow ones come first."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.path.name == "test_memory.py" or "peak_anonymous" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("memory"))
        elif "gpu" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("gpu"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed by the name of the test: its inputs do not depend on which tests ran before it."""
    seed = zlib.crc32(f"{item.config.getoption('hypothesis_seed')} {item.nodeid}".encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """quantized(model, scheme, form=None): directory of a tiny model in that scheme; "none" is the model itself."""

    @cache
    def quantize(model: str, scheme: str, form: str | None = None) -> Path:
        if scheme == "none":
            return MODELS / model
        output = tmp_path_factory.mktemp("quantized") / f"{model}-{scheme}-{form}"
        source = open_checkpoint(MODELS / model)
        execute(plan_quantize(source, QuantizeOptions(scheme, form)), source, output)
        return output

    return quantize


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, quantized: Callable[..., Path]) -> Callable[..., Path]:
    """packed(model, scheme, form=None): the same, packed for CPUs."""

    @cache
    def pack(model: str, scheme: str, form: str | None = None) -> Path:
        output = tmp_path_factory.mktemp("packed") / f"{model}-{scheme}-{form}"
        source = open_checkpoint(quantized(model, scheme, form))
        execute(plan_pack(source, CpuTarget()), source, output)
        return output

    return pack


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine can run, the emulated one included, chosen for one test."""
    before = ops.isa()
    ops.select_isa(request.param)
    yield request.param
    ops.select_isa(before)
