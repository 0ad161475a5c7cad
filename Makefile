# Every target sets itself up on a machine that has Python 3.11, Java 17, Maven, Go and make.
# What is installed stands in .venv, and the servers that tests start in ~/.cache/tidelog-test.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 4
CHECKED := $(addprefix tests/,model codec catalog store coordination log journal pipeline)
# Without its bytecode, all of a process's modules are compiled again at each start: tests start many.
unexport PYTHONDONTWRITEBYTECODE
IMAGE_EXTRAS := $(addprefix --extra ,aws formats kafka scylla serve tables telemetry)
LOCK_FLAGS := --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q

.PHONY: help demo check test test-long lint format docs bench bench-sim lock setup servers prepare clean

help:
	@echo "make demo       see it work: sample events, an archive, and the console"
	@echo "make check      lint and the unit tests of the library, in two minutes: before each commit"
	@echo "make test       all tests that fit into minutes, with real servers"
	@echo "make test-long  the long ones: whole kill matrices, many seeds"
	@echo "make lint       ruff, mypy, import-linter, the code's own shape"
	@echo "make docs       the site of docs/, into build/site"
	@echo "make bench      speed, beside a peer in the same run"
	@echo "make bench-sim  2,000 seeds of the simulated log"
	@echo "make lock       pin the newest versions that pyproject.toml allows"

demo: $(READY)
	-@$(BIN)/python -m tests.servers check
	@$(BIN)/tidelog up --demo

check: lint
	$(BIN)/python -m pytest -q -m "unit and not slow" -n $(WORKERS) --dist loadgroup $(CHECKED)

test: $(READY)
	@$(BIN)/python -m tests.servers check
	-@$(BIN)/python -m tests.servers fetch
	$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --dist loadgroup --no-loadscope-reorder \
	  --durations=30

test-long: $(READY)
	@$(BIN)/python -m tests.servers check
	-@$(BIN)/python -m tests.servers fetch
	$(BIN)/python -m pytest -m long --timeout=3600

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_tidy.py

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html is the first page; python3 -m http.server -d build/site serves it with search"

bench-sim: $(READY)
	$(BIN)/python -m tests.sim 2000

bench: $(READY)
	@$(BIN)/python -m tests.servers check
	$(BIN)/python -m bench

servers: $(READY)
	$(BIN)/python -m tests.servers fetch

# So that neither a test waits until a server is built, nor each worker compiles all tests.
prepare: servers
	@$(BIN)/python -m pytest --collect-only -q >/dev/null

setup: $(READY)

$(READY): requirements.lock requirements-bootstrap.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "tidelog: \`$(PYTHON)\` is missing or older than 3.11: install Python 3.11 or later, or set PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
	  echo "tidelog: \`$(PYTHON) -m venv\` failed: install Python's venv module (Debian: python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-bootstrap.lock
	$(BIN)/uv pip sync -q --require-hashes requirements.lock
	$(BIN)/uv pip install -q --no-deps --no-build-isolation -e .
	@touch $@

lock:
	$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --upgrade $(LOCK_FLAGS) -o requirements.lock
	echo uv | $(BIN)/uv pip compile - -c requirements.lock $(LOCK_FLAGS) -o requirements-bootstrap.lock
	echo hatchling | $(BIN)/uv pip compile - -c requirements.lock $(LOCK_FLAGS) --no-annotate -o deploy/requirements-build.lock
	$(BIN)/uv pip compile pyproject.toml $(IMAGE_EXTRAS) -c requirements.lock $(LOCK_FLAGS) --no-annotate -o deploy/requirements.lock
	$(BIN)/uv pip compile pyproject.toml --extra aws -c requirements.lock $(LOCK_FLAGS) --no-annotate -o deploy/aws/requirements.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
