# A fresh machine needs Python 3.11 or newer and nothing else: no compiler, no CUDA toolkit, no GPU.
# Every target makes .venv first. `make TARGET PYTHON=python3` uses that interpreter as it is instead, and installs nothing.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BASE_PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
ARGS ?=

ifndef PYTHON
PYTHON := .venv/bin/python
READY := .venv/ready
endif

# pip's chatter cut down to one line for each package, so that a long download does not look like a hang.
PIP := .venv/bin/python -m pip --disable-pip-version-check
BRIEF := awk '/^ *(Downloading|Installing)/ { print substr("  " $$0, 1, 120); fflush() }'

.PHONY: help generate test gpu-test bench check format demo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  ARGS='...' is handed to generate, test, gpu-test, bench and demo; PYTHON=python3 skips .venv; TORCH=... picks the torch to install."

.venv/ready: pyproject.toml
	@echo "[1/3] Python environment in .venv"
	@$(BASE_PYTHON) -c 'import sys; sys.exit("flashgen needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@$(BASE_PYTHON) -m venv .venv
	@echo "[2/3] $(TORCH) (the largest part: minutes on a slow network)"
	@$(PIP) install "$(TORCH)" | $(BRIEF)
	@echo "[3/3] flashgen, NVRTC and the tools"
	@$(PIP) install -e '.[cuda,torch,bench,dev]' | $(BRIEF)
	@touch $@

generate: $(READY) ## write generated/, compile it for every chip and print the table (no GPU)
	$(PYTHON) -m flashgen generate $(ARGS)

test: $(READY) ## the tests that need no GPU
	$(PYTHON) -m pytest -n $(JOBS) -m "not gpu" tests $(ARGS)

gpu-test: $(READY) ## the tests that need a GPU
	$(PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

bench: $(READY) ## time flashgen against every peer that is installed (GPU)
	$(PYTHON) -m flashgen bench $(ARGS)

check: $(READY) ## style, types, layering, thin templates, generated/ up to date
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q tests/unit/test_layering.py tests/unit/test_thin_templates.py
	$(PYTHON) -m flashgen generate --check

format: $(READY) ## rewrite the sources in the style that check asks for
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

demo: $(READY) ## train a very small language model through flashgen
	$(PYTHON) examples/char_gpt.py --small $(ARGS)

clean: ## remove .venv and what the tools leave behind
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
