# `make demo` and `make test` need Python 3.11+ and pip, and nothing else: the first call builds
# .venv, later calls reuse it until pyproject.toml or constraints.txt change.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/stamp-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-slow check format clean

demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/shuffled-dpsgd train digits --output runs/demo

test: check
	$(BIN)/pytest -q -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist worksteal -m 'slow and not gpu and not network'

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	rm -f .venv/stamp-*
	touch $@
