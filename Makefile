# Both main targets work on a fresh machine: they create .venv and install into it first, which is skipped while
# pyproject.toml stays the same.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo docs figures test coverage test-lowest lint format trials release-check

help:
	@echo "make demo           train on the built-in glyphs with several losses and compare them (minutes, no download)"
	@echo "make test           lint, types, all tests"
	@echo "make coverage       all tests again, and fail where they execute less of the package than pyproject.toml demands"
	@echo "make test-lowest    tests of the core and of training with the lowest versions that pyproject.toml permits"
	@echo "make lint           lint and types only"
	@echo "make docs           build the site into docs/_build/html, without a network if there is none; a warning is an error"
	@echo "make figures        compute and draw the pictures of the site again (minutes)"
	@echo "make format         let ruff rewrite what it can"
	@echo "make release-check  build wheel and sdist, check them, install the wheel in a new environment and use it, then test-lowest"
	@echo "make trials         kill and resume 50 runs and 18 of two processes, 1,200 cases of bad input, 10 minutes of training watched for leaks"

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

# a process for each core with one thread each: the tests are many and small
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

# not part of `make test`: the tracer makes it slower
coverage: $(INSTALLED)
	$(BIN)/pytest --cov --cov-report=term:skip-covered --cov-report=xml

# a virtual environment of its own, with the oldest packages that are supported
LOWEST := .venv-lowest
$(LOWEST)/.installed: pyproject.toml tests/lowest-versions.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/lowest-versions.txt \
		--editable '.[glyphs,train]' hypothesis pytest pytorch-metric-learning==2.9.0 scikit-learn torchmetrics
	touch $@

# that an old package calls something deprecated is not ours to mend; oneDNN of torch 2.7 uses bfloat16 instructions that some
# virtual processors announce and do not have
test-lowest: $(LOWEST)/.installed
	ONEDNN_MAX_CPU_ISA=AVX2 $(LOWEST)/bin/python -m pytest -W ignore::DeprecationWarning -W ignore::FutureWarning \
		tests/ops tests/losses tests/eval tests/train tests/models \
		tests/test_device.py tests/test_files.py tests/test_messages.py tests/test_oracle.py tests/test_public_names.py

docs: $(INSTALLED)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

figures: $(INSTALLED)
	$(BIN)/rankgrad figures --format png --width 1280 --out docs/figures

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

trials: $(INSTALLED)
	$(BIN)/python -m benchmarks.trials.kill --trials 50 --forked
	$(BIN)/python -m benchmarks.trials.kill --trials 18 --processes 2
	$(BIN)/python -m benchmarks.trials.fuzz --cases 1200 --commands 36
	$(BIN)/python -m benchmarks.trials.soak --minutes 10

release-check: test-lowest
	.ci/release-check $(PYTHON)
