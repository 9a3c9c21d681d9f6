# make quickstart   install into .venv, train, forecast and score on the data that ship with the package
# make test         run all tests           make lint    ruff          make docs    strict build of the documentation
# make wheel        build dist/*.whl        make clean   remove what was built (not .venv, not runs)
# make install-all  install everything that the other targets need

VENV ?= .venv
CONFIG ?= config/quickstart.yml
# at most eight processes: a login node's hundred cores belong to others too; a file's tests share what it has started
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5

# the build of the documentation runs its notebooks (force), or leaves their outputs out (off)
NOTEBOOKS ?= force

PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$name; break; fi; done)

BIN := $(VENV)/bin

.PHONY: quickstart test lint docs wheel clean install-all
.DEFAULT_GOAL := quickstart

quickstart: $(VENV)/.credit
	$(BIN)/credit train $(CONFIG)
	$(BIN)/credit rollout $(CONFIG)
	$(BIN)/credit verify $(CONFIG)

test: $(VENV)/.credit-test $(VENV)/.cf
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.credit-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(VENV)/.credit-docs
	NOTEBOOKS=$(NOTEBOOKS) $(BIN)/sphinx-build -W -n --keep-going -q -b html docs docs/_build/html

wheel: $(VENV)/.credit-test
	$(BIN)/python -m build --wheel

install-all: $(VENV)/.credit-test $(VENV)/.credit-docs $(VENV)/.cf

clean:
	rm -rf build dist docs/_build *.egg-info .pytest_cache .ruff_cache

# The stamps are older than setup.cfg only when requirements may have changed: a second call installs nothing.
$(VENV)/.credit: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.credit-test: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@ $(VENV)/.credit

$(VENV)/.credit-docs: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[docs]'
	touch $@ $(VENV)/.credit

# The checker of CF conventions needs pyproj, whose PROJ crashes beside that of ecCodes: it has its own environment.
$(VENV)/.cf: Makefile | $(BIN)/python
	$(BIN)/python -m venv --without-pip $(VENV)/cf
	$(BIN)/python -m pip --python $(VENV)/cf/bin/python install -q 'compliance-checker>=6.1,<7'
	touch $@

# Some systems' Python comes with pip but without ensurepip, which venv needs to put pip into the environment.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one or run: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is missing or older than 3.11; run: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
