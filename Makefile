# Two commands: `make ladder` shows the whole ladder measured, `make test` passes the tests.
# Each sets up .venv first: exact versions from constraints.txt, the C++ extension built.
# TORCH=cpu takes PyTorch's small build without CUDA. PYTHON=python3.12 takes another Python.
# Other words: make test-all (the slow tests, too), make build (the extension again), make clean;
# not in a handout
# make lint, make gluon (stage 9 under other versions of Triton), make cubins (stages 4 to 8 for
# every card, in every size and dtype).
# end

PYTHON ?= python3
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
# The pins hold for what the build itself needs, too: older pips read the first variable for that,
# newer ones the second. No absolute path: pip would split it at its spaces.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n 4 --dist worksteal
# hundreds of processes start, and each would compile all that it imports
export PYTHONDONTWRITEBYTECODE :=
# the files that have a timing test: to collect all the others takes longer than most of them
TIMED = $(shell grep -rlw --include='test_*.py' pytest.mark.timing tests)

# not in a handout
LINT := lint
# what is linted: what git has, whatever else lies about; where there is no git, all
TRACKED = $(wildcard $(shell git ls-files '*.py' 2> /dev/null))
TYPED = $(filter-out tests/% notebooks/%,$(TRACKED))

# besides the pinned one; each is a download of 190 MB
TRITONS := 3.6.0 3.8.0 3.9.0
# end

.PHONY: ladder test test-all lint gluon cubins build clean

ladder: $(VENV)/ladder.stamp
	@$(BIN)/python -m harness run

test: $(VENV)/test.stamp $(LINT)
	$(PYTEST) -m "not slow and not timing"

test-all: $(VENV)/test.stamp $(LINT)
	$(PYTEST) -m "not timing"
	$(if $(TIMED),$(BIN)/python -m pytest -m timing $(TIMED))

# not in a handout
lint: $(VENV)/test.stamp
	@echo "ruff, mypy and import-linter on $(if $(TRACKED),what git has,all that is here)"
	@$(BIN)/python -m ruff check $(if $(TRACKED),pyproject.toml $(TRACKED),.)
	@$(BIN)/python -m ruff format --check $(or $(TRACKED),.)
	@$(BIN)/python -m mypy $(TYPED)
	@$(BIN)/python -c 'from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))'

# no GPU needed: the tests read the machine code
cubins: $(VENV)/test.stamp
	LADDER_CUBINS=all $(PYTEST) tests/stages/test_cubins.py -k "every_kernel or products"

gluon: $(VENV)/test.stamp $(TRITONS:%=build/triton/%)
	@for version in $(TRITONS); do echo "Triton $$version"; LADDER_TRITON=build/triton/$$version \
	$(BIN)/python -m pytest -q tests/stages/test_cubins.py -k hopper || exit 1; done

build/triton/%:
	$(BIN)/python -m pip install --no-deps --target $@.part triton==$*
	mv $@.part $@
# end

build:
	rm -f $(VENV)/*.stamp
	$(MAKE) $(VENV)/ladder.stamp

# what `make` is told: one line for each cause
$(BIN)/python:
	@[ -w . ] || { echo "This folder can't be written to, and $(VENV) belongs in it: \
	copy the checkout to a folder of your own."; exit 1; }
	@command -v "$(PYTHON)" > /dev/null || { echo "$(PYTHON) is not there. \
	Python 3.11 to 3.14 is needed: make PYTHON=python3.12 ..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
	echo "Python 3.11 to 3.14 is needed, $(PYTHON) is $$("$(PYTHON)" --version 2>&1): \
	make PYTHON=python3.12 ..."; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null || { echo "$(PYTHON) lacks its module \
	venv: on Debian and Ubuntu, apt install python3-venv."; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

# what of pip's output is shown while it installs: large downloads; all of it goes to install.log
SHORT := awk -v log_file=$(VENV)/install.log '{ print > log_file } /^FAILED$$/ { failed = 1 } \
	/Downloading .*\([0-9][0-9.]+ [MG]B\)/ { split($$2, name, "-"); \
	size = $$3 " " $$4; gsub(/[()]/, "", size); if (size + 0 >= 10 || size ~ /GB/) print "  " name[1] " " name[2] ": " size; \
	fflush() } END { exit failed }'

# $(1) the extras after notebooks, $(2) the stamps. Offline, changed pins alone are no reason to stop: $? holds
# everything where nothing has been installed yet.
define install
	@echo "Installing into $(VENV): a few minutes the first time, most of them the download. Large parts:"
	$(if $(TORCH),@$(PIP) install --quiet uv && $(BIN)/python -m uv pip install --python $(BIN)/python \
	--constraints constraints.txt --torch-backend $(TORCH) torch)
	@if { $(PIP) install --editable '.[notebooks$(1)]' || printf '\nFAILED\n'; } | $(SHORT); then touch $(2); \
	elif [ -z "$(filter-out pyproject.toml constraints.txt,$?)" ] && \
	! $(PIP) --retries 0 index versions uv > /dev/null 2>&1; then \
	echo "Warning: $? changed, but the package index can't be reached. Going on with $(VENV) as it is."; \
	else exit 1; fi
	@[ ! -d csrc ] || $(BIN)/python -c 'import ladder_value_graph' 2> /dev/null || { \
	echo "Stage 2 is left out, since no C++ compiler was found, or no Python.h. To have it, install them"; \
	echo "(Debian, Ubuntu: apt install g++ python3-dev; macOS: xcode-select --install), then: make build"; }
endef

$(VENV)/ladder.stamp: $(SOURCES) | $(BIN)/python
	$(call install,,$@)

$(VENV)/test.stamp: $(SOURCES) | $(BIN)/python
	$(call install,$(COMMA)test,$@ $(VENV)/ladder.stamp)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
