# Each target sets up what it needs on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-stamp
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu test-hostile test-scale lint format docs bench bench-gpu wheel bundle clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Create .venv with pinned dependencies
$(STAMP): requirements/dev.txt requirements/no-deps.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("voxtune needs Python 3.11 or newer: make setup PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/no-deps.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP) ## Generate a brain MRI from a mask on a CPU
	$(BIN)/voxtune demo -o out/demo

test: $(STAMP) ## Run the quick tests (no GPU needed)
	$(BIN)/python -m pytest -m "not gpu and not slow and not hostile and not scale" -n 2 --dist worksteal

test-slow: $(STAMP) ## Run the slow tests; the record to commit is benchmarks/results/slow-tests.json
	$(BIN)/python -m pytest -m "slow and not gpu and not hostile and not scale" -n 2 --dist worksteal --record=benchmarks/results/slow-tests.json

test-scale: $(STAMP) ## Run the campaign of large data sets and killed processes; the record is benchmarks/results/scale-tests.json
	$(BIN)/python -m pytest -m "scale and not gpu" --record=benchmarks/results/scale-tests.json

test-gpu: $(STAMP) ## Run the tests that need a CUDA device; the records are benchmarks/results/gpu-tests.json and gpu-tests-alone.json
	$(BIN)/python -m pytest -m "gpu and not alone" -n 8 --dist worksteal --record=benchmarks/results/gpu-tests.json
	$(BIN)/python -m pytest -m "gpu and alone" --record=benchmarks/results/gpu-tests-alone.json

test-hostile: $(STAMP) ## Run the campaign of damaged files and interruptions; the record is benchmarks/results/hostile-tests.json
	$(BIN)/python -m pytest -m "hostile and not gpu" -n 2 --dist worksteal --record=benchmarks/results/hostile-tests.json

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/mypy
	$(BIN)/shellcheck deploy/install.sh deploy/slurm/*.sh
	$(BIN)/hadolint deploy/Dockerfile

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix src tests benchmarks tools
	$(BIN)/ruff format src tests benchmarks tools

docs: $(STAMP) ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP) ## Measure one denoising step on this CPU, as rows in benchmarks/results
	$(BIN)/python benchmarks/cpu_step.py

bench-gpu: $(STAMP) ## Measure denoising steps, volumes, the ladder and single kernels on this GPU
	$(BIN)/python benchmarks/gpu_unet3d_sample.py
	$(BIN)/python benchmarks/gpu_unet2d_ladder.py --part top,rungs
	$(BIN)/python benchmarks/gpu_volume.py
	$(BIN)/python benchmarks/gpu_sustained.py
	$(BIN)/python benchmarks/gpu_group_norm.py
	$(BIN)/python benchmarks/gpu_conv3d.py
	$(BIN)/python benchmarks/gpu_small_kernels.py
	$(BIN)/python benchmarks/gpu_doubling_conv.py
	$(BIN)/python benchmarks/gpu_elementwise.py
	$(BIN)/python benchmarks/gpu_gradients.py
	$(BIN)/python benchmarks/gpu_unet3d_train.py --cases 128,batch_2,batch_4,brats,256,monai,nnunet,segresnet --passes --breakdown

wheel: $(STAMP) ## Build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

bundle: $(STAMP) ## Pack wheels, weights and an installer for a machine without internet; TORCH=no leaves PyTorch out
	$(BIN)/python tools/bundle.py -o dist $(if $(filter no,$(TORCH)),--without-torch) $(foreach model,$(MODELS),--model $(model))

clean: ## Remove everything that was built
	rm -rf .venv build dist out site .pytest_cache .ruff_cache .mypy_cache .hypothesis
