# Two commands on a fresh machine: `make demo`, `make test`.
# Another torch (say, a CUDA build): make demo TORCH_INDEX=https://…  TORCH=torch==2.12.0

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)

.PHONY: demo test check docs clean

# One thread a process unless a process is told otherwise: more only fight over few cores.
export OMP_NUM_THREADS ?= 1

demo: $(VENV)/.installed
	$(BIN)/penstock train

# Two workers, of which only one runs the tests that start processes. --seeds: crash schedules (40 without it).
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup --seeds 500

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/make_docs.py --check

docs: $(VENV)/.installed-dev
	$(BIN)/python tools/make_docs.py

# torch first and by its exact version, so that no range chooses another. On Linux PyPI's is a CUDA build of several
# gigabytes; TORCH_INDEX=… takes the CPU build.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(INDEX) "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt && echo "$(TORCH)" >> $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c $(VENV)/constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
