# Set-up, demo and tests. Needs only python3 (>= 3.11) with venv; PYTHON picks another one.
# PY=python3 uses an existing environment as it is and installs nothing.

PYTHON ?= python3
VENV   ?= .venv
PY     ?= $(VENV)/bin/python
MAKEFLAGS += --no-print-directory

GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1)
comma := ,
# PyTorch is needed by the tests only. On Python 3.11 this release also exists as a small CPU build.
TORCH := $(shell $(PYTHON) -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch")')

.PHONY: help demo test gpu-test lint clean
help:
	@echo "make demo      install into $(VENV) and generate text in all three state modes"
	@echo "make test      install the test tools as well, lint, run the tests that need no GPU"
	@echo "make gpu-test  run the tests that need an NVIDIA GPU"
	@echo "make clean     remove $(VENV) and caches"

ifeq ($(PY),$(VENV)/bin/python)
READY := $(VENV)/.model
TEST_READY := $(VENV)/.test
endif

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.model: pyproject.toml | $(VENV)/bin/python
	@echo "installing jax-ssm into $(VENV) (a minute or two the first time)"
	$(PY) -m pip install -q --disable-pip-version-check -e '.[model$(if $(GPU),$(comma)cuda)]'
	@touch $@

$(VENV)/.test: $(VENV)/.model
	@echo "installing the test tools"
	$(PY) -m pip install -q --disable-pip-version-check '$(TORCH)' -e '.[model,train,test,bench$(if $(GPU),$(comma)cuda$(comma)torch)]'
	@touch $@

demo: $(READY)
	$(PY) -m jax_ssm.cli demo

test: $(TEST_READY) lint
	JAX_PLATFORMS=cpu $(PY) -m pytest -m "not gpu" -n 2 --dist loadfile --durations=10

lint: $(TEST_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

gpu-test: $(TEST_READY)
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make gpu-test: no NVIDIA GPU found (nvidia-smi -L fails); 'make test' needs none"; exit 2; }
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false $(PY) -m pytest -m gpu -n 4

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache build *.egg-info
