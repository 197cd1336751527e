# `make help` lists the targets. Everything runs in .venv, which `make setup` makes.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
STAMP := $(VENV)/.set-up
ARGS ?=

.PHONY: help setup demo test check format clean \
	check-format check-lint check-types check-imports check-generated check-wheel

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

setup: $(STAMP) ## make .venv with everything, and the servers that the tests need (once)

# torch is a step of its own: as a dependency, its range would let pip choose another build
$(STAMP): pyproject.toml constraints.txt scripts/install_servers.sh grafana/typecheck/package-lock.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "moe-telemetry needs Python 3.10 or newer: make setup PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt -e '.[all,dev]'
	scripts/install_servers.sh
	@touch $@

demo: setup ## train a small MoE on two ranks and watch its routers (ARGS='--serve')
	$(BIN)/moe-telemetry demo $(ARGS)

test: setup ## run the tests (ARGS='-k name')
	$(BIN)/python -m pytest $(ARGS)

check: check-format check-lint check-types check-imports check-generated check-wheel ## format, lint, types, imports, generated files, wheel

check-format: setup
	@echo '--- format (make format)'
	$(BIN)/ruff format --check --quiet .

check-lint: setup
	@echo '--- lint'
	$(BIN)/ruff check --quiet .

check-types: setup
	@echo '--- types'
	$(BIN)/mypy

check-imports: setup
	@echo '--- import direction'
	$(BIN)/lint-imports --no-logo

check-generated: setup
	@echo '--- generated files'
	$(BIN)/python scripts/generate_docs.py --check
	$(BIN)/python -m scripts.generate_grafana --check

check-wheel: setup
	@echo '--- wheel, in an environment of its own'
	$(BIN)/python scripts/check_wheel.py

format: setup ## format the code, apply safe fixes, write the generated files
	$(BIN)/ruff check --quiet --fix . || true
	$(BIN)/ruff format --quiet .
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python -m scripts.generate_grafana

clean: ## remove all that make made, .venv included
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
