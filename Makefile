# Everyday commands; the first one that needs it makes .venv, and later ones call pip only when a listed file changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
ARGS ?=
# Test processes; the ranks that tests share are few besides. WORKERS=0 runs all in one, as a debugger needs it.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-long test-all lint format bench coverage clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "make %-9s %s\n", $$1, $$2}'

demo: $(STAMP) ## run the demo
	$(BIN)/python examples/demo.py $(ARGS)

# Many ranks share the cores of one machine: a thread pool in each of them would only fight over them.
test test-rest test-long coverage: export OMP_NUM_THREADS = 1
# An empty value counts as none: test processes and ranks are many, and none should compile what another one has.
test test-rest: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) ## run the tests, all but the slow ones (ARGS="-k name" to choose)
	$(PYTEST) -m "not slow" $(ARGS)

# Random tests once more, with many more examples; --hypothesis-seed=1 and so on draws others.
test-rest: export HYPOTHESIS_PROFILE = thorough
test-rest: $(STAMP)
	$(PYTEST) -m "(slow or hypothesis) and not long" --hypothesis-seed=0 $(ARGS)

test-long: $(STAMP)
	$(PYTEST) -m long $(ARGS)

test-all: test test-rest test-long ## run all tests: sweeps, every model of the zoo, random tests with many examples

lint: $(STAMP) ## ruff on everything, mypy on the package
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy pipecut

format: $(STAMP) ## let ruff format and mend what it can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

coverage: $(STAMP) ## try every model of the installed transformers (ARGS="llama --stages 4" to choose)
	$(BIN)/python -m benchmarks.coverage $(ARGS)

bench: $(STAMP) ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove caches, build artefacts and demo outputs (.venv stays)
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Order-only where it is a prerequisite: bin/python is a link, whose date is that of the system's interpreter.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# setuptools first, then no build isolation: an isolated build would download its own copy of it each time.
# The constraints settle torch and everything else in one resolution.
$(STAMP): setup.cfg constraints.txt pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) setuptools wheel
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,hf,peft]'
	@touch $@
