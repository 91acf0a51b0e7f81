# From a bare clone: `make demo` shows it, `make test` proves it. Both do their own set-up.
# `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Passed to every `pip install`, here and in tests/test_wheel.py: `make setup PIP_FLAGS=--isolated`.
PIP_FLAGS ?=
export PIP_FLAGS
# Test processes at a time; one file stays in one process, so a file's servers start once.
WORKERS ?= auto
# More arguments for pytest: `make test TESTS=tests/metadata`, `make test TESTS='-k window'`.
TESTS ?=
# The file for `make demo`; without one it makes its own small multi-turn load.
TRACE ?=
DEMO_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# Suites that need more than a Python environment or more than a few minutes. .ci/run and .ci/full run them.
SUITES := sglang rdma chaos soak browser helm trace
EMPTY :=
COMMA := ,
QUICK := not ($(subst $(EMPTY) $(EMPTY), or ,$(SUITES)))
# The one list of pure modules: values in, values out, 100 % of branches covered.
# tests/test_floors.py reads it and keeps I/O out of them; `make cover` keeps the coverage.
PURE := metadata/pools metadata/pool_json metadata/namespace metadata/page_hash metadata/object_keys \
	metadata/sglang_keys metadata/hit_policy metadata/page_runs metadata/shard_bitmap metadata/codec \
	metadata/msgpack_keys metadata/registered metadata/circuit metadata/page_wire \
	metadata/page_claims metadata/quota_rules dataplane/host_pool dataplane/host_fragments \
	dataplane/rdma_devices \
	dataplane/page_statements dataplane/host_tier dataplane/host_pages dataplane/host_publish \
	dataplane/host_reserve dataplane/host_ledger dataplane/host_slots dataplane/host_ages \
	dataplane/host_tree dataplane/host_spaces dataplane/host_chain dataplane/host_sanity \
	dataplane/host_answers api/tokens

.PHONY: help setup test cover lint demo bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 12

setup: $(STAMP) ## make .venv with everything but torch (PYTHON=python3.12 picks the interpreter)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "caketin needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "Cannot make $(VENV): is Python's venv module installed (Debian: python3-venv)?" >&2; exit 1; }
	@pip() { $(BIN)/python -m pip install $(PIP_FLAGS) --disable-pip-version-check --quiet "$$@"; }; \
	echo "Installing caketin into $(VENV) (a minute or two the first time) ..."; \
	pip -c constraints.txt -e '.[server,dev,cpu]' || { \
	  alone=$$(pip --dry-run --no-deps "$$(grep ^mooncake constraints.txt)" 2>&1 || true); \
	  pip --dry-run --no-deps "$$(grep ^msgspec constraints.txt)" >/dev/null 2>&1 && \
	    [[ $$alone == *"No matching distribution"* ]] || { \
	    echo "Set-up failed; pip says above why (a package index that cannot be reached looks like this)." >&2; \
	    exit 1; }; \
	  echo "Mooncake has no wheel for this machine: going on without it, with the file store." >&2; \
	  pip -c constraints.txt -e '.[server,dev]'; }
	@$(BIN)/python -c 'import mooncake.store' 2>/dev/null || { \
	  echo "Note: Mooncake does not load here, so only the file store is at hand."; \
	  echo "      $$($(BIN)/python -c 'import mooncake.store' 2>&1 | tail -1)"; \
	  echo "      (On Debian: apt-get install libibverbs1 libnuma1 libcurl4.)"; }
	@touch $@

test: setup ## the quick suites, under five minutes
	@code=0; $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "$(QUICK)" $(TESTS) || code=$$?; \
	echo; echo "Left out here: $(SUITES)."; \
	echo "Run one with: $(BIN)/python -m pytest -m NAME (what each needs: CONTRIBUTING.md)."; \
	echo "All that this machine can run: bash .ci/full"; \
	exit $$code

cover: setup ## the pure modules' tests, failing under 100 % of branches
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "$(QUICK)" --cov-branch --cov-report= \
	  $(foreach p,$(sort $(dir $(PURE))),--cov=$(p:/=)) \
	  tests/metadata $(foreach m,$(filter-out metadata/%,$(PURE)),$(wildcard tests/$(dir $(m))test_$(notdir $(m))*.py))
	$(BIN)/python -m coverage report --show-missing --fail-under=100 \
	  --include=$(subst $(EMPTY) $(EMPTY),$(COMMA),$(addsuffix .py,$(PURE)))

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: setup ## replay a load through an embedded stack (TRACE=file takes yours)
	$(BIN)/caketin replay $(TRACE) $(DEMO_FLAGS)

bench: setup ## every benchmark; numbers, no verdicts
	@for file in benchmarks/[!_]*.py; do \
	  [ -e "$$file" ] || { echo "no benchmarks here yet"; exit 0; }; \
	  echo "== $$file"; $(BIN)/python "$$file"; done

clean: ## remove .venv and every cache
	rm -rf $(VENV) .venv-3.* dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
