# Everything runs from a virtual environment in .venv/, which `make` builds by itself.
# CPU-only machines outside this pin's index: make TORCH_INDEX=https://download.pytorch.org/whl/cpu test
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast lint bench docs clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv with the pinned packages (the other targets do it by themselves)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Bessemer needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) -V 2>&1). Type: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv module. Type: apt-get install python3-venv"; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null \
	  || { echo "No C++ compiler. Type: apt-get install g++"; exit 1; }
	@echo "Setting up .venv (a few minutes the first time) ..."
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]'
	@touch $@

demo: $(STAMP) ## train, evaluate, export and try a small model: about three minutes after set-up
	@$(BIN)/python examples/first_heat.py

test: $(STAMP) ## the whole test suite
	@$(BIN)/python -m pytest tests

test-fast: $(STAMP) ## the tests that take less than five seconds each
	@$(BIN)/python -m pytest tests -m 'not slow'

lint: $(STAMP) ## ruff (rules and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP) ## every speed and size claim, measured side by side on this machine
	@$(BIN)/python bench/run_all.py

docs: $(STAMP) ## regenerate the generated parts of docs/
	@$(BIN)/python docs/generate.py

clean: ## remove what make built (runs/ stays)
	rm -rf .venv build .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
