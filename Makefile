# `make help` lists the targets. Everything runs in .venv, which every target makes or refreshes when needed.

PYTHON ?= $(firstword $(foreach it,python3.11 python3.12 python3.13 python3,$(shell command -v $(it) 2>/dev/null)))
PY := .venv/bin/python
RUN := $(PY) -m
# Seed of the long versions, and folders of tests to leave it at: `make test-long SEED=1 ONLY=tests/transfer`.
# Of the matrix, which cells (an expression of pytest's -k): `make test-matrix ONLY="hybrid and not ngram"`.
SEED ?= 0
ONLY ?=
# Tests that wait in real time and measure it: over NIXL they run one after the other, as real engines do; those in memory
# mostly sleep, and run on twice WORKERS processes with nothing else beside them. The rest runs on WORKERS processes.
NIXL_WORLDS := tests/transfer/sessions/test_nixl_worlds.py
REAL_TIME := tests/transfer/agent tests/transfer/processes $(NIXL_WORLDS)
IN_MEMORY := tests/transfer/sessions
# Tests that need nothing but a package and what it declares: with ONCE they are left to `test-packages`, which runs them.
PACKAGED := tests/kernels tests/transfer
NOT_PACKAGED := (nixl or vllm or prometheus or drawn or patient) and not (gpu or multi_gpu or long or compat)
ONCE ?=
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)

.DEFAULT_GOAL := help
.PHONY: help setup check test test-suite test-long test-matrix test-packages test-compat test-gpu demo bench format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## Make or refresh .venv with everything needed (about two minutes when new)
	@test -n "$(PYTHON)" || { echo "kvferry needs Python 3.11 or newer: no python3 in PATH (make PYTHON=/path/to/python3.11)"; exit 1; }
	@$(PYTHON) tools/environment/make_venv.py

check: setup ## Check format, lint, types and who imports whom
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	.venv/bin/lint-imports --no-logo

test: check test-packages ## Run all that CI runs (real vLLM and NIXL included, no GPU)
	@$(MAKE) --no-print-directory test-suite ONCE=yes

test-suite: setup ## Run the test suite alone: real engines, then real time, then the rest on WORKERS processes
	@failed=0; many="--numprocesses=$(WORKERS) --dist=worksteal"; \
	$(RUN) pytest tests/e2e || failed=1; \
	$(RUN) pytest $(REAL_TIME) || failed=1; \
	$(RUN) pytest $(IN_MEMORY) --ignore=$(NIXL_WORLDS) --numprocesses=$$((2 * $(WORKERS))) --dist=worksteal || failed=1; \
	$(RUN) pytest $(PACKAGED) $(addprefix --ignore=,$(REAL_TIME) $(IN_MEMORY)) $(if $(ONCE),-m "$(NOT_PACKAGED)") $$many || failed=1; \
	$(RUN) pytest $(addprefix --ignore=,tests/e2e $(PACKAGED)) $$many && exit $$failed

test-packages: setup ## Test each package in an environment of its own, without what it does not declare
	$(PY) tools/check_packages.py

test-long: setup ## Run the long versions of tests and write their summary to docs/evidence/
	$(PY) tools/run_long.py --seed $(SEED) $(ONLY)

test-matrix: setup ## Cross versions of vLLM, models and switches, and write the verdicts to docs/evidence/
	$(PY) tools/run_matrix.py --only "$(ONLY)"

test-compat: setup ## Check names and signatures against the sources of other vLLM versions
	$(RUN) pytest -m compat tests/compat

test-gpu: setup ## Run the tests that need one or several GPUs
	$(RUN) pytest -m "gpu or multi_gpu"

demo: setup ## Hand a prompt over between two real vLLM servers and show what it cost
	$(PY) tools/demo/demo.py

bench: setup ## Run every benchmark: each prints a table and appends a row to its CSV file
	@for script in tools/bench/*.py; do echo "== $$script"; $(PY) $$script || exit 1; done

format: setup ## Format and fix what can be fixed without thought
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

clean: ## Remove environments, caches and everything else that make has made
	rm -rf .venv .venvs .work .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
