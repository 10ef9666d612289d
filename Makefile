# make demo: set up and run the main job on the shipped models. make test: set up and run every check and test.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where pip's own index has no CPU build of torch, name an index that has one: make demo TORCH_INDEX=...
TORCH_INDEX ?=
BIN := .venv/bin
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -1

.venv/.torch: Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@
.venv/.built: .venv/.torch pyproject.toml CMakeLists.txt $(wildcard kernels/csrc/* kernels/csrc/*/* kernels/csrc/*/*/*)
	$(BIN)/pip install -q --disable-pip-version-check "scikit-build-core>=0.11" "cmake>=3.25" ninja
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e ".[hf,dev]" "$(TORCH)"
	@touch $@

setup: .venv/.built
demo: setup
	$(BIN)/python examples/demo.py
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard kernels/csrc/*.[ch]* kernels/csrc/*/*.[ch]* kernels/csrc/*/*/*.[ch]*)
test: check
	$(BIN)/python -m pytest -q
clean:
	rm -rf build dist .venv demo-out
.PHONY: help setup demo check test clean
