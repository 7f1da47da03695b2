# The torch that was tested. `make test TORCH=2.11.0` tries another one.
TORCH ?= 2.13.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-long test-all test-gpu-rules test-strangers benchmarks docs package clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a GPT on two CPU processes with strategy=tensor_parallel"
	@echo "make test       ruff, mypy and the tests; 8 minutes on two cores"
	@echo "make test-long  tests that make test leaves to CI, as long again"
	@echo "make test-all   all tests, those that take minutes or gigabytes included"
	@echo "make test-gpu-rules  tests on fake CUDA devices and under NCCL's rules; needs g++"
	@echo "make test-strangers  models of public packages, unedited, in a virtual environment of their own"
	@echo "make benchmarks each strategy against a loop by hand and stock peers, into docs/benchmarks.md; a quarter of an hour"
	@echo "make docs       the documentation, into site/"
	@echo "make package    sdist and wheel in dist/; the wheel is installed alone, and trained with"
	@echo "make clean      remove $(VENV), $(STRANGERS), $(PACKAGED), site/, dist/ and build/"

# A GPT learns Python from the standard library's own sources, its weights split over two processes.
demo: $(VENV)/examples-$(TORCH).stamp
	$(BIN)/python examples/gpt.py fit --trainer.strategy=tensor_parallel --trainer.accelerator=cpu --trainer.devices=2

test: $(VENV)/test-$(TORCH).stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lightning_par
	$(BIN)/python -m pytest -m "not slow and not long"

# Much of this is whole runs under a layout, of which make test has some of each kind.
test-long: $(VENV)/test-$(TORCH).stamp
	$(BIN)/python -m pytest -m long

test-all: $(VENV)/test-$(TORCH).stamp
	$(BIN)/python -m pytest -m "slow or not slow"

# A GPU's rules without a GPU, once for each kind of queue; see docs/contributing/gpu_rules.md.
GPU_RULES := tests/law/test_equality.py tests/law/test_hybrid_equality.py tests/law/test_features.py tests/pipeline/test_surface.py

test-gpu-rules: $(VENV)/test-$(TORCH).stamp
	$(BIN)/python -m pytest -m "slow or not slow" tests/gpu_rules
	$(BIN)/python -m pytest -m "slow or not slow" --gpu-rules=communicator $(GPU_RULES)
	$(BIN)/python -m pytest -m "slow or not slow" --gpu-rules=rank $(GPU_RULES)

# Public packages, which ask for much: they have an environment of their own. None may pull in another torch.
STRANGERS := .venv-strangers

test-strangers: $(STRANGERS)/installed-$(TORCH).stamp
	$(STRANGERS)/bin/python -m pytest -n 0 -p no:cacheprovider tests/strangers/strangers.py

$(STRANGERS)/installed-$(TORCH).stamp: pyproject.toml
	$(PYTHON) -m venv $(STRANGERS)
	@rm -f $(STRANGERS)/*.stamp
	$(STRANGERS)/bin/pip install --quiet torch==$(TORCH)
	echo torch==$(TORCH) > $(STRANGERS)/constraints.txt
	$(STRANGERS)/bin/pip install --quiet -c $(STRANGERS)/constraints.txt -e '.[strangers]'
	$(STRANGERS)/bin/python -c "import torchvision" || $(STRANGERS)/bin/python tests/strangers/vision.py
	@touch $@

# Figures are those of the machine it runs on, which should have nothing else to do.
benchmarks: $(VENV)/test-$(TORCH).stamp
	$(BIN)/python -m tests.benchmarks.table

# torch comes first and alone: what follows then finds it there and never replaces it.
$(VENV)/torch-$(TORCH).stamp:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'lightning_par needs Python 3.10 or newer')"
	$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/*.stamp
	$(BIN)/pip install --quiet torch==$(TORCH)
	@touch $@

$(VENV)/%-$(TORCH).stamp: pyproject.toml $(VENV)/torch-$(TORCH).stamp
	$(BIN)/pip install --quiet torch==$(TORCH) -e '.[$*]'
	@touch $@

docs: $(VENV)/docs-$(TORCH).stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The wheel is tried where nothing of the checkout is: in an environment of its own, from another folder.
PACKAGED := .venv-package

package: $(VENV)/package-$(TORCH).stamp
	rm -rf build dist $(PACKAGED)
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check_wheel.py dist/*.whl
	$(PYTHON) -m venv $(PACKAGED)
	$(PACKAGED)/bin/pip install --quiet torch==$(TORCH) dist/*.whl
	away=$$(mktemp -d) && cp .ci/fit_installed.py $$away && cd $$away && \
		PYTHONPATH= $(CURDIR)/$(PACKAGED)/bin/python fit_installed.py && rm -r $$away

clean:
	rm -rf $(VENV) $(STRANGERS) $(PACKAGED) site dist build
