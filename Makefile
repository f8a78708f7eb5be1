# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What was installed for; a changed requirement installs again.
USER_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: demo test check bench mutants clean help

help:
	@echo "make demo     train the digits under four protocols with real processes, draw error against time"
	@echo "make test     run the whole test suite"
	@echo "make check    ruff and mypy --strict"
	@echo "make bench    cost of the coordinator and of the virtual engine, timing simulation beside SimPy,"
	@echo "              decoupled backpropagation beside PyTorch's pipelines, on two idle cores,"
	@echo "              and its memory beside what is predicted"
	@echo "make mutants  seeded mistakes in protocols, schedules and modules, and what catches each"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "expected Python 3.10 or newer, got $$($(PYTHON) --version); try make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(USER_STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(DEV_STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(USER_STAMP)

demo: $(USER_STAMP)
	@rm -rf demo
	$(BIN)/gruppetto compare digits --learners 8 --delay exponential:mean=0.05 \
	  --protocol hardsync --protocol k-sync:k=6 --protocol k-batch-async:k=4 --protocol async \
	  --epochs 15 --evaluate-every 0.25 --target accuracy=0.95 --out demo

test: $(DEV_STAMP)
	$(BIN)/python -m pytest --numprocesses auto --quiet

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV_STAMP)
	$(BIN)/python benchmarks/coordinator.py
	$(BIN)/python benchmarks/virtual_engine.py
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/decoupled.py
	$(BIN)/python benchmarks/decoupled_memory.py

mutants: $(DEV_STAMP)
	$(BIN)/python tests/protocols/mutants.py
	$(BIN)/python tests/decoupled/schedule_mutants.py
	$(BIN)/python tests/decoupled/module_mutants.py

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
