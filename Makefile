# `make demo` and `make test` work from a bare machine: Python 3.11 or later with its headers, and a C++ compiler.

PYTHON ?= python3
CXX ?= g++
BIN := .venv/bin
INSTALLED := .venv/.installed
PYTEST_ARGS ?=
WORKERS ?= 2
DEMO_STEPS ?= 800
DEMO := runs/demo

export CXX

.PHONY: demo test slow interpreted lint types install clean
.DELETE_ON_ERROR:

demo: install
	rm -rf $(DEMO)
	HF_HUB_OFFLINE=1 $(BIN)/fp4 train --out $(DEMO) --steps $(DEMO_STEPS) --vocab 512 --batch 4 --seq 128 --lr 4e-3 --eval-every 100

# A file's tests share fixtures that train and compile, so a file is one worker's; one thread each, else workers wait for each other.
# Workers take files in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

test: lint
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# Of kernels and single ops the tests share nothing, and a worker takes the other's.
ALONE := tests/kernels tests/runtime
slow: interpreted
	$(PYTEST) -m slow $(ALONE:%=--ignore %) $(PYTEST_ARGS)
	$(PYTEST) -m slow --dist worksteal $(ALONE) $(PYTEST_ARGS)

# Kernels under Triton's interpreter, which is chosen before Triton is imported; their tests share nothing.
interpreted: install
	rm -rf build/interpreted
	TRITON_INTERPRET=1 FP4_CACHE_DIR=build/interpreted $(PYTEST) --dist worksteal tests/kernels/interpreted $(PYTEST_ARGS)

lint: types
	$(BIN)/ruff check .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p fp4 -p tests

# The folders lie at the top of the repository and install as fp4.compiler, fp4.passes, ...; mypy wants to see them there.
types: install
	rm -rf build/types
	mkdir -p build/types/fp4
	ln -s $(CURDIR)/tests build/types/tests
	ln -s $(CURDIR)/fp4/* $(addprefix $(CURDIR)/,compiler passes runtime kernels) build/types/fp4/

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here; install Python 3.11 or later, or write make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) -V), fp4 needs 3.11 or later; write make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
		{ echo "$(PYTHON) has no headers (Python.h), compiled code needs them; install e.g. python3-dev"; exit 1; }
	@command -v $(CXX) >/dev/null || { echo "no C++ compiler $(CXX) here, Inductor needs one; install g++, or write make CXX=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[train,test]"
	touch $@

clean:
	rm -rf .venv build runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
