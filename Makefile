# Every target sets up what it needs: a virtual environment in .venv, the package, an embedded PostgreSQL.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests, demo and measurements start hundreds of processes: without its cache, Python compiles busload anew in each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test lint style types examples collect package sync figures servers bench chaos explore mutants docs screenshots clean

help:  ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: .venv/ready  ## Make .venv with busload, embedded PostgreSQL and the test tools

# Dependency groups need pip 25.1, and a new environment of Debian 12 has pip 23.
.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("busload needs Python 3.11 or later, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group test
	touch .venv/ready

demo: setup  ## Run 10,000 commands as one batch on an embedded PostgreSQL
	$(BIN)/busload demo

# The checks run side by side, each with its output in one piece; if one fails, make stops before the tests.
# Tests wait for servers and processes a part of their time: four processes keep two cores busy. What each of them imports is
# compiled before, once: they begin at the same moment, and each would compile all of it.
test: setup  ## Lint, check types, run every test
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint collect package
	$(BIN)/python -m pytest -n 4 --dist worksteal --durations 25

lint: style types examples  ## ruff, mypy, and the examples as a user's project by mypy and pyright

style: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

examples: setup
	$(BIN)/python scripts/check_examples.py

collect: servers  ## Import every test
	@collected=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$collected"; exit 1; }

package: setup  ## Build sdist and wheel into dist/, and try the wheel in an empty environment; of other Pythons too: PYTHONS="..."
	$(BIN)/python scripts/try_package.py $(PYTHONS)

sync: setup  ## Make src/busload/sync, the API without await, from the async modules
	$(BIN)/python scripts/generate_sync.py

figures: setup  ## Write what the docs make from the code: tables, docstrings, the changelog page and llms.txt
	$(BIN)/python scripts/generate_figures.py
	$(BIN)/python -m tests.explorer.crash_points
	$(BIN)/python -m tests.explorer.publishing
	$(BIN)/python -m tests.proof
	$(BIN)/python scripts/generate_docs.py

servers: setup .venv/brokers  ## Install what the tests run on: PostgreSQL 15, the oldest we support, PgBouncer and brokers
	@sh scripts/install-servers.sh

.venv/brokers: .venv/ready scripts/install-servers.sh
	@sh scripts/install-servers.sh
	$(BIN)/python -m pip install --quiet --group brokers
	touch .venv/brokers

chaos: servers  ## Long fault runs: kill workers and brokers, restart PostgreSQL, freeze processes
	$(BIN)/python -m pytest -m chaos -p no:randomly --timeout 3600 -s

explore: setup  ## Try schedules of many actors, statement by statement; options in EXPLORE="..."
	$(BIN)/python -m tests.explorer $(EXPLORE)

mutants: setup  ## Plant faults in copies of the package; each must make its test fail; some by name in MUTANTS="..."
	$(BIN)/python -m tests.mutants.run $(MUTANTS)

bench: setup  ## Measure busload beside its peers and the machine's limits (about 40 minutes); options in BENCH="..."
	-@$(MAKE) --no-print-directory servers  # a broker that cannot be installed is named as not measured
	$(BIN)/python -m pip install --quiet --group bench
	$(BIN)/python -m bench.install
	$(BIN)/python -m bench --chart docs/assets $(BENCH)

docs: setup  ## Render docs/ to site/
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/zensical build --strict

screenshots: servers  ## Take the pictures of docs/dashboard.md anew, light, dark and on a phone, with an animation
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python scripts/screenshots.py

clean:  ## Remove what the other targets made
	rm -rf .venv site dist .mypy_cache .ruff_cache .pytest_cache
