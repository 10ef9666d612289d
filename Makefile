# make demo: set up and run the main job on the shipped models. make test: set up and run every check and test.
# make test-fast: the checks and the quick tests, within 90 seconds on two cores. make check: ruff, mypy, clang-format.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where pip's own index has no CPU build of torch, name an index that has one: make demo TORCH_INDEX=...
TORCH_INDEX ?=
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
docs: setup
	$(PIP) --no-build-isolation -e ".[docs]" "$(TORCH)"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
dist: setup
	$(PIP) --no-build-isolation -e ".[release]" "$(TORCH)"
	PATH="$(CURDIR)/$(BIN):$$PATH" release/build.sh
clean:
	rm -rf build dist .venv demo-out
.PHONY: help setup demo check test test-fast docs dist clean
