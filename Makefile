# ICML 2024, executed. `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
# A pip index that serves the CPU build of torch, when the default index serves the CUDA build.
TORCH_INDEX ?=
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED ?= 0
export PYDEVD_DISABLE_FILE_VALIDATION ?= 1

.DEFAULT_GOAL := help
.PHONY: help book test lint unit notebooks serve run bench a11y records clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z0-9_]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

book: $(VENV)/.ok  ## check the notebook pairs and render the book into _build/html
	@$(BIN)/python tools/book.py

test: lint unit notebooks  ## lint, types, unit tests, and every notebook under nbval

lint: $(VENV)/.ok  ## style, spelling, types, import rules
	@$(BIN)/ruff check . || { echo "Style: try .venv/bin/ruff check --fix ."; exit 1; }
	@$(BIN)/ruff format --check --quiet src tests tools || \
	  { echo "Format: run .venv/bin/ruff format src tests tools"; exit 1; }
	@$(BIN)/codespell src tests tools book README.md CONTRIBUTING.md
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

unit: $(VENV)/.ok  ## unit tests and the examples in the docstrings
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --doctest-modules src

notebooks: $(VENV)/.ok  ## execute every notebook and compare with the stored outputs
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --nbval --nbval-current-env \
	  --nbval-cell-timeout=900 book

serve: book  ## build and open the book at http://localhost:8000
	@$(BIN)/python -m http.server -d _build/html 8000

run: $(VENV)/.ok  ## execute one notebook pair: make run NB=book/<slug>/01_name.md
	@test -n "$(NB)" || { echo "Say which notebook: make run NB=book/<slug>/01_name.md"; exit 2; }
	@$(BIN)/python tools/nb.py fmt $(NB)
	@$(BIN)/python tools/nb.py run $(NB)

records: $(VENV)/.ok  ## refresh the README table and scorecard.json from the notebooks
	@$(BIN)/python tools/records.py

bench: $(VENV)/.ok  ## speed and memory against the peers, and the page that shows them
	@mkdir -p _build
	@$(BIN)/python -m pytest -q -p no:xdist --benchmark-sort=name --benchmark-json=_build/bench.json \
	  tests/benchmarks
	@$(BIN)/python tools/speed.py _build/bench.json

a11y: book  ## accessibility and layout of every page, in headless Chromium
	@cd tests/a11y && npm install --silent --no-audit --no-fund && node check.mjs ../../_build/html

clean:  ## remove everything that was built
	rm -rf _build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One marker file stands for the finished environment: an interrupted install leaves none.
$(VENV)/.ok: pyproject.toml constraints.txt archives.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer."; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is too old: this needs Python 3.11 or newer (make PYTHON=python3.11 ...)."; exit 2; }
	@rm -f $@
	@echo "Setting up $(VENV) (a few minutes, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) || { echo "$(INSTALL_HINT)"; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[all]" || \
	  { echo "$(INSTALL_HINT)"; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r archives.txt || \
	  { echo "$(INSTALL_HINT)"; exit 1; }
	@touch $@

INSTALL_HINT := The install stopped half-way. Check the network and run the same command again.
