# Two commands: `make ladder` shows the whole ladder measured, `make test` passes the tests.
# Each sets up .venv first: exact versions from constraints.txt, the C++ extension built.
# Other words: make test-all (the slow tests, too), make build (the extension again), make lint,
# make clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
# the pins hold for what the build itself needs, too
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n 4 --dist worksteal
# the files that have a timing test: to collect all the others takes longer than most of them
TIMED = $(shell grep -rlw --include='test_*.py' pytest.mark.timing tests)

.PHONY: ladder test test-all lint build clean

ladder: $(VENV)/ladder.stamp
	@$(BIN)/ladder run

test: $(VENV)/test.stamp lint
	$(PYTEST) -m "not slow and not timing"

test-all: $(VENV)/test.stamp lint
	$(PYTEST) -m "not timing"
	$(BIN)/python -m pytest -m timing $(TIMED)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

build:
	rm -f $(VENV)/*.stamp
	$(MAKE) $(VENV)/ladder.stamp

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "no venv: on Debian and Ubuntu, apt install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/ladder.stamp: $(SOURCES) | $(BIN)/python
	$(PIP) --editable '.[notebooks]'
	@touch $@

$(VENV)/test.stamp: $(SOURCES) | $(BIN)/python
	$(PIP) --editable '.[notebooks,test]'
	@touch $@ $(VENV)/ladder.stamp

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
