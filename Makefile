# make demo   set up what is missing, then one prompt, plain and speculative in turn
# make test   set up what is missing, then the tests
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-all lint format bench clean

demo: .venv/installed
	@$(BIN)/forerun generate --compare "Write a short story about a lighthouse keeper. Then write the same story again, word for word."

test: .venv/installed-dev
	$(BIN)/python -m pytest

test-all: .venv/installed-dev
	$(BIN)/python -m pytest -m "slow or not slow"

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/forerun bench

# Without an NVIDIA GPU, torch 2.13.0 comes first: where a CPU build of it is at hand, pip takes that one.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "forerun needs Python 3.10 or newer; $$($(PYTHON) --version) was found. Set PYTHON=…"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing forerun and torch into .venv (once)"
	@command -v nvidia-smi >/dev/null || $(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install torch==2.13.0
	@$(PIP) install -e '.[torch]'
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "installing the tools for tests into .venv (once)"
	@$(PIP) install -e '.[torch,dev]'
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
