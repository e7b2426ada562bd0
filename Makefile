# The commands of this project. `make demo` draws a picture, `make test` checks everything.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := diffusion_core models offload pipelines schedulers
PROMPT ?= a small red circle above a large blue square on a yellow background
# Tests run one process a core; more threads in each would only fight.
WORKERS ?= $(shell nproc)
# Tests on simulated devices, which need processes of their own.
SIMULATED := tests/offload/simulator tests/guides/simulator
ELSEWHERE := $(addprefix --ignore ,$(SIMULATED))

.PHONY: demo test test-slow lint types docs bench shapes-score clean

demo: $(VENV)/.demo
	$(BIN)/diffusion-core generate "$(PROMPT)" --seed 7 --upscale 4 --output picture.png

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ELSEWHERE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(SIMULATED)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow -s $(ELSEWHERE)
	$(BIN)/python -m pytest -m slow -s $(SIMULATED)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/lint && $(BIN)/pip install -q --no-deps --target build/lint .
	cd build/lint && $(abspath $(BIN))/lint-imports ../../pyproject.toml

types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs
	rm -rf build/docs && $(BIN)/pip install -q --no-deps --target build/docs .
	PYTHONPATH=build/docs $(BIN)/mkdocs build --strict

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks run --short --against diffusers

shapes-score: $(VENV)/.test
	$(BIN)/python -m benchmarks.shapes.evaluate

clean:
	rm -rf build dist $(VENV) *.egg-info

# One environment; each marker adds what its commands need.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@
