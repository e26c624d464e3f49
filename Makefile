# make demo   a real vLLM server, on this machine's CPU, answers through the plugin and is checked
# make test   everything that needs no GPU; the newest version of each engine
# make help   the rest

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Variables that a user may set: make demo ARGS="--json result.json"
PYTHON ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
SETUP_GB ?= 5
ARGS ?=
GPU_PYTHON ?= python3
export PYTHON TORCH_INDEX SETUP_GB

BUILD_LOCK := ci/requirements-build.txt
DEV_LOCK := ci/requirements-dev.txt
VLLM_LOCK := ci/requirements-vllm-cpu.txt
SGLANG_LOCK := ci/requirements-sglang-cpu.txt
BIN := .venv/bin
SGLANG_BIN := .venv-sglang/bin
NO_ENGINE := not gpu and not engine_vllm and not engine_sglang

.PHONY: help demo test setup setup-dev setup-sglang lint docs-check unit seams test-vllm test-sglang test-gpu sanitize-gpu matrix docs build clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo 'Variables: PYTHON (a Python 3.11 or later), TORCH_INDEX (where the CPU build of torch is looked for'
	@echo '  last; now $(TORCH_INDEX)), SETUP_GB (disk space asked for), ARGS (of demo and matrix),'
	@echo '  GPU_PYTHON (of test-gpu).'

demo: setup ## serve a small DeepSeek-V3.2 with a real vLLM server and compare every token
	$(BIN)/nsa-plugin demo $(ARGS)

test: lint docs-check unit seams test-vllm test-sglang ## everything that needs no GPU
	@echo 'make test: all of it holds'

setup:
	@ci/setup.sh .venv $(BUILD_LOCK) $(VLLM_LOCK)

setup-dev:
	@ci/setup.sh .venv $(BUILD_LOCK) $(VLLM_LOCK) $(DEV_LOCK)

setup-sglang: SETUP_GB = 3
setup-sglang:
	@ci/setup.sh .venv-sglang $(BUILD_LOCK) $(SGLANG_LOCK) $(DEV_LOCK)

lint: setup-dev ## ruff, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs-check: setup-dev ## what make docs writes is up to date
	$(BIN)/python -m ci.measured --check
	$(BIN)/python -m ci.docs --check

unit: setup-dev ## the tests that start no engine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m '$(NO_ENGINE)'

seams: setup-dev ## look up what the plugin changes in every supported engine version, and calls in every FlashInfer
	$(BIN)/python -m ci.seams
	$(BIN)/python -m ci.flashinfer_contract

test-vllm: setup-dev ## the newest vLLM that runs on a CPU, started for real
	$(BIN)/python -m pytest -m engine_vllm

test-sglang: setup-sglang ## the newest SGLang that runs on a CPU, started for real
	$(SGLANG_BIN)/python -m pytest -m engine_sglang tests/sglang

test-gpu: ## the tests that need a CUDA device, by GPU_PYTHON of an environment that has one
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu tests/parallel

sanitize-gpu: ## the plugin's kernels on small cases under compute-sanitizer, for bad accesses and for races
	# memcheck would report the driver functions that cuda.bindings looks up and an older driver lacks.
	for tool in "memcheck --report-api-errors no" racecheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(GPU_PYTHON) -m pytest -m sanitize tests/gpu/test_small_gpu.py || exit 1; \
	done

matrix: setup-dev setup-sglang ## every engine version of ci/matrix.toml; writes docs/compatibility.md
	$(BIN)/python -m ci.matrix $(ARGS)

docs: setup-dev ## rewrite what is generated: measurements.py and parts of the documentation
	$(BIN)/python -m ci.measured
	$(BIN)/python -m ci.docs

build: setup-dev ## the wheel and the sdist, in dist/
	$(BIN)/python -m build --no-isolation

clean: ## what was built and measured, the environments included
	rm -rf .venv .venv-sglang .cache dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
