# Both main targets work on a fresh machine: they create .venv and install into it first, which is skipped while
# pyproject.toml stays the same.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint format

help:
	@echo "make demo     train on the built-in glyphs with several losses and compare them (minutes, no download)"
	@echo "make test     lint, types, all tests"
	@echo "make lint     lint and types only"
	@echo "make format   let ruff rewrite what it can"

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/rankgrad demo

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
