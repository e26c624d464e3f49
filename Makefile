# make demo   serve a small model with a real vLLM server on this machine's CPU and check its answers
# make test   run every test that needs no GPU, with the newest version of each engine
# make help   list all targets

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Variables users may set, for example: make demo ARGS="--json result.json"
PYTHON ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
SETUP_GB ?= 5
ARGS ?=
JOBS ?= 2
GPU_PYTHON ?= python3
export PYTHON TORCH_INDEX SETUP_GB
# Without bytecode each of the hundreds of processes that tests start would compile the plugin again.
unexport PYTHONDONTWRITEBYTECODE

BUILD_LOCK := ci/requirements-build.txt
DEV_LOCK := ci/requirements-dev.txt
RELEASE_LOCK := ci/requirements-release.txt
DOCS_LOCK := ci/requirements-docs.txt
VLLM_LOCK := ci/requirements-vllm-cpu.txt
SGLANG_LOCK := ci/requirements-sglang-cpu.txt
BIN := .venv/bin
SGLANG_BIN := .venv-sglang/bin
# The files with tests of a real vLLM: to collect all tests takes each process ten seconds and more.
VLLM_TESTS = $(sort $(shell grep -rlw engine_vllm --include='test_*.py' tests))
NO_ENGINE := not gpu and not engine_vllm and not engine_sglang
# JOBS processes; one that has nothing left to do takes tests of another.
PARALLEL := -n $(JOBS) --dist worksteal
# Threads of one engine that spin while they wait take the cores from the other process's engine.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: help demo test setup setup-dev setup-sglang lint docs-check unit seams test-vllm test-sglang test-gpu sanitize-gpu soak matrix docs site build release-check clean

help: ## list the targets and variables
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo 'Variables: PYTHON (Python 3.11 or later), TORCH_INDEX (the last index to try for the CPU build of torch;'
	@echo '  now $(TORCH_INDEX)), SETUP_GB (free disk space required), ARGS (arguments of demo, soak, matrix and release-check),'
	@echo '  JOBS (test processes; now $(JOBS)), GPU_PYTHON (Python of test-gpu and soak).'

demo: setup ## serve a small DeepSeek-V3.2 with a real vLLM server and compare every token
	$(BIN)/nsa-plugin demo $(ARGS)

test: lint docs-check unit seams test-vllm test-sglang ## run every check and test that needs no GPU
	@echo 'make test: all checks and tests passed'

setup:
	@ci/setup.sh .venv $(BUILD_LOCK) $(VLLM_LOCK)

setup-dev:
	@ci/setup.sh .venv $(BUILD_LOCK) $(VLLM_LOCK) $(DEV_LOCK)

# Its packages that vLLM's environment has too, torch and Triton among them, are not installed twice.
setup-sglang: SETUP_GB = 3
setup-sglang:
	@SHARE=.venv ci/setup.sh .venv-sglang $(BUILD_LOCK) $(SGLANG_LOCK) $(DEV_LOCK)

lint: setup-dev ## check style, format, types and the licences of requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m ci.audit

docs-check: setup-dev ## check that the generated documentation is up to date
	$(BIN)/python -m ci.measured --check
	$(BIN)/python -m ci.docs --check

unit: setup-dev ## run the tests that start no engine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m '$(NO_ENGINE)'

seams: setup-dev ## check the plugin's patches against every supported engine version and its calls against every FlashInfer
	$(BIN)/python -m ci.seams
	$(BIN)/python -m ci.flashinfer_contract

test-vllm: setup-dev ## test with a real vLLM, the newest that runs on a CPU
	$(ONE_THREAD) VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m pytest $(PARALLEL) -m engine_vllm $(VLLM_TESTS)

test-sglang: setup-sglang ## test with a real SGLang, the newest that runs on a CPU
	$(SGLANG_BIN)/python -m pytest $(PARALLEL) -m engine_sglang tests/sglang

test-gpu: ## run the tests that need a CUDA device with GPU_PYTHON
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu tests/parallel

sanitize-gpu: ## run small kernel cases under compute-sanitizer to find invalid accesses and races
	# Otherwise memcheck reports driver functions that cuda.bindings looks up and an older driver lacks.
	for tool in "memcheck --report-api-errors no" racecheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(GPU_PYTHON) -m pytest -m sanitize tests/gpu/test_small_gpu.py || exit 1; \
	done

SOAK_ON_GPU := $(findstring --engine,$(ARGS))
soak: $(if $(SOAK_ON_GPU),,setup) ## load a real server for an hour, then kill a worker (ARGS="--engine sglang": on a GPU)
	$(if $(SOAK_ON_GPU),$(GPU_PYTHON),$(BIN)/python) -m ci.soak $(ARGS)

matrix: setup-dev setup-sglang ## start every engine version of ci/matrix.toml and write docs/compatibility.md
	$(BIN)/python -m ci.matrix $(ARGS)

docs: setup-dev ## regenerate the packaged measurements and the generated documentation
	$(BIN)/python -m ci.measured
	$(BIN)/python -m ci.docs

site: SETUP_GB = 1
site: ## build the documentation site in site/; a broken link is an error
	@PLUGIN=none ci/setup.sh .venv-docs $(DOCS_LOCK)
	.venv-docs/bin/python -m mkdocs build --strict

build: setup-dev ## build the wheel and the sdist in dist/
	$(BIN)/python -m build --no-isolation

release-check: SETUP_GB = 1
release-check: ## try the wheel with the newest engines for a CPU, resolve it beside all (ARGS: --engine, --version, --only)
	@PLUGIN=none ci/setup.sh .venv-release $(BUILD_LOCK) $(RELEASE_LOCK)
	.venv-release/bin/python -m ci.release_check $(ARGS)

clean: ## delete build outputs, caches and the environments
	rm -rf .venv .venv-sglang .venv-release .venv-docs site .cache dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
