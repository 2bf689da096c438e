# Each target sets up what it needs on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-stamp
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu lint format bench bench-gpu wheel clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with everything pinned
$(STAMP): requirements/dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("voxtune needs Python 3.11 or newer: make setup PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP) ## Draw a brain MRI from a mask, on a CPU, in minutes
	$(BIN)/voxtune demo -o out/demo

test: $(STAMP) ## The tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist worksteal

test-slow: $(STAMP) ## The tests too long for every run
	$(BIN)/python -m pytest -m slow

test-gpu: $(STAMP) ## The tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu --record benchmarks/results/gpu-tests.json

lint: $(STAMP) ## Style and types
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/mypy

format: $(STAMP) ## Put the code into the house's form
	$(BIN)/ruff check --fix src tests benchmarks tools
	$(BIN)/ruff format src tests benchmarks tools

bench: $(STAMP) ## One denoising step on this CPU, as rows in benchmarks/results
	$(BIN)/python benchmarks/cpu_step.py

bench-gpu: $(STAMP) ## One denoising step on this GPU: PyTorch's ways, and the plans; the ladder; whole volumes; its kernels alone
	$(BIN)/python benchmarks/gpu_unet3d_sample.py
	$(BIN)/python benchmarks/gpu_unet2d_ladder.py --part top,rungs
	$(BIN)/python benchmarks/gpu_volume.py
	$(BIN)/python benchmarks/gpu_group_norm.py
	$(BIN)/python benchmarks/gpu_conv3d.py
	$(BIN)/python benchmarks/gpu_small_kernels.py

wheel: $(STAMP) ## Build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean: ## Remove what was made
	rm -rf .venv build dist out .pytest_cache .ruff_cache .mypy_cache .hypothesis
