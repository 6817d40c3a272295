# Everything a newcomer types. A virtual environment is made once and reused.
#   make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu   takes torch from another index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test parity check lint format clean

quickstart: $(VENV)/.installed
	$(BIN)/boost data prepare sotu_1790_1899 --tokenizer bpe4096 --validation-last 6 --out data/quickstart
	$(BIN)/boost train quickstart
	$(BIN)/boost generate runs/quickstart --prompt "Fellow citizens of the Senate" --max-tokens 60

# Two files at a time: much of it waits, for ranks to start or for time to pass.
test: $(VENV)/.tests
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

# The full product of layouts and options, where `make test` runs a covering set; and many more kills.
parity: $(VENV)/.tests
	BOOST_FULL_PARITY=1 $(BIN)/python -m pytest $(addprefix tests/distributed/test_, \
		layout_parity.py zero.py pipeline.py compile.py sltrain.py relora.py) tests/test_elasticity.py

check: lint
	$(BIN)/python -m pytest tests --ignore=tests/distributed -m "not slow" -x

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

# One stamp per set of extras, so that a second run installs nothing.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --index-url $(TORCH_INDEX) torch)
	$(PIP_INSTALL) -e ".[report]"
	touch $@

$(VENV)/.tests: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --index-url $(TORCH_INDEX) torch)
	$(PIP_INSTALL) -e ".[test]"
	touch $@ $(VENV)/.installed

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e ".[dev]"
	touch $@ $(VENV)/.tests $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist
