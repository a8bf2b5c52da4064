# ringlab. `make` alone prints what there is to make.
#
# A stamp in .venv says that a step was finished; it is written last, so that a step that failed or
# was interrupted is done again, and one that is done is not.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PYTHON := $(VENV)/bin/python
MADE := $(VENV)/.made
PACKAGES := $(VENV)/.packages
BUILT := $(VENV)/.built
NATIVE := $(wildcard engine/native/*.[ch])

# What the caller's shell holds for other Pythons stays out of ours.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE := 1

# A virtual environment knows its folder and its interpreter. When the folder has moved, the
# interpreter does not run any more, or RINGLAB_PYTHON names another one, it is made anew.
SOUND := $(PYTHON) -c '' && [ "$$(cat $(MADE))" = '$(CURDIR)' ]
ifdef RINGLAB_PYTHON
SOUND += && [ "$$(cat $(VENV)/.asked)" = '$(RINGLAB_PYTHON)' ]
endif
ifneq ($(shell { $(SOUND) && echo sound; } 2>/dev/null),sound)
$(MADE): FORCE
endif

.PHONY: help setup lab test hunt report bench sanitize lint lock clean FORCE

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

$(MADE):
	@base=$$(tools/bootstrap.sh python); \
	echo "ringlab: making $(VENV) with $$base"; \
	"$$base" -m venv --clear $(VENV); \
	echo '$(RINGLAB_PYTHON)' > $(VENV)/.asked; \
	echo '$(CURDIR)' > $@

$(PACKAGES): requirements.lock $(MADE)
	@tools/bootstrap.sh packages $(PYTHON)
	@touch $@

$(BUILT): $(PACKAGES) pyproject.toml setup.py engine/build_native.py $(NATIVE)
	@tools/bootstrap.sh toolchain $(PYTHON)
	@echo "ringlab: building the engine"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
		--editable .
	@touch $@

setup: $(BUILT) ## a virtual environment in .venv, with the engine built
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "ringlab: ready; make lab or make test is next",:)

lab: setup ## JupyterLab on notebooks/, on loopback
	@$(VENV)/bin/ringlab lab

test: setup ## all tests (PYTEST_ARGS are handed on)
	@tools/bootstrap.sh browser
	@tools/bootstrap.sh qemu
	@$(PYTHON) -m tests.run $(PYTEST_ARGS)

hunt: setup ## the property tests with 20 times as many outsides, at random (RINGLAB_HUNT: times)
	@RINGLAB_HUNT=$${RINGLAB_HUNT:-20} $(PYTHON) -m pytest --timeout=0 $(PYTEST_ARGS) \
		tests/engine/test_properties.py tests/engine/test_relay_properties.py

report: setup ## every case's notebook, executed, its HTML, and a page in front of them
	@$(VENV)/bin/ringlab report --all

bench: setup ## benchmarks: ratios, not tests
	@$(PYTHON) bench/run.py $(BENCH_ARGS)

sanitize: setup ## the native tests under the address, undefined-behaviour and thread sanitizers
	@engine/native/sanitize.sh

lint: setup ## ruff and mypy
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m mypy

lock: ## work out requirements.lock again from pyproject.toml (needs uv)
	@uv pip compile pyproject.toml --extra test --extra dev --universal --fork-strategy fewest \
		--python-version 3.11 --generate-hashes --no-header --no-annotate \
		--no-emit-find-links --quiet --output-file requirements.lock

clean: ## remove what make made; runs and reports stay
	@rm -rf $(VENV) build ringlab.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@rm -f engine/_native.c engine/_native*.so
	@find engine lab tests bench tools notebooks -name __pycache__ -type d -prune \
		-exec rm -rf {} + 2>/dev/null || true
