# `make demo` and `make test` need Python 3.11+ and pip, and nothing else: the first call builds
# .venv, later calls reuse it until pyproject.toml or constraints.txt change.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/stamp-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# Modules stay compiled for the next process, whatever the shell says: tests start many.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-gpu test-kernels attack check size format docs package clean

demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/shuffled-dpsgd train digits --output runs/demo

test: check
	$(BIN)/pytest -q -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist worksteal -m 'slow and not gpu and not network'

# With whatever Python has torch for the GPU: GPU machines often come with their own.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -rs -m gpu $$(grep -rl 'mark\.gpu' tests)

# Compiles all kernels on four releases of Triton, fetched by name; needs no GPU.
test-kernels: $(STAMP)
	$(BIN)/python -m benchmarks.compile_kernels --triton 3.6 3.7 3.8 3.9

# Computes the noise of a private step from its weights: the old generator's, and tries today's.
attack: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m attacks

check: $(STAMP) size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Lines by room; fails above a budget.
size:
	$(PYTHON) tests/architecture/size.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site in site/, offline and strictly: a link that leads nowhere fails.
docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict --quiet

# Wheel and source distribution in dist/; their version is the newest tag.
package: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	rm -f .venv/stamp-*
	touch $@
