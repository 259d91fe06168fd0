# make demo   set up what is missing, then one prompt, plain and speculative in turn
# make test   set up what is missing, then the tests
PYTHON ?= python3
BIN := .venv/bin
CMAKE ?= $(or $(shell command -v cmake),$(BIN)/cmake)
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
NATIVE := $(wildcard src/forerun/native/*)

.PHONY: demo test test-all lint format bench clean

demo: .venv/installed
	@$(BIN)/forerun generate --compare < examples/demo-prompt.txt

test: .venv/installed-dev
	$(BIN)/python -m pytest

test-all: .venv/installed-dev
	$(BIN)/python -m pytest -m "slow or not slow"

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(CMAKE) -G "Unix Makefiles" -S . -B build/lint -DFORERUN_MODULE=OFF -DFORERUN_KERNEL_TEST=ON -DFORERUN_WERROR=ON -DCMAKE_BUILD_TYPE=Debug >/dev/null
	@echo "compiling the C++ sources, warnings as errors"
	@$(CMAKE) --build build/lint >/dev/null

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/forerun bench

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "forerun needs Python 3.10 or newer; $$($(PYTHON) --version) was found. Set PYTHON=…"; exit 1; }
	@$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml CMakeLists.txt $(NATIVE) | .venv/bin/python
	@echo "installing forerun into .venv and building its kernels (once)"
	@$(PIP) install -e .
	@touch $@

# Without an NVIDIA GPU, torch 2.13.0 comes first: where a CPU build of it is at hand, pip takes that one.
.venv/installed-dev: .venv/installed
	@echo "installing torch and the tools for tests into .venv (once)"
	@command -v nvidia-smi >/dev/null || $(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install torch==2.13.0
	@$(PIP) install -e '.[torch,dev]'
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
