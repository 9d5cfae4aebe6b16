# The two commands of the README are `make serve` and `make test`; both make .venv when it is not there (docs/install.md).
# PYTHON=/path/to/python3.11 names the interpreter; PORT and ARGS go to `slimserve ... --serve`.

DEFAULT_PROFILE = smollm2-135m-bf16-cpu
BIN = .venv/bin
CHECKED = slimserve quixicore kv_tier harness tests tools

.PHONY: serve test setup setup-dev lint docs-check lock clean

serve: setup
	@exec $(BIN)/slimserve $(DEFAULT_PROFILE) --serve $(if $(PORT),--port $(PORT)) $(ARGS)

# The engine wants the cores for itself, so its tests come after the others, one by one. 5: ARGS chose none of a kind.
test: lint docs-check
	$(BIN)/python -m pytest -q -n auto -m "not engine and not gpu" $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -q -m "engine or gpu" $(ARGS) || [ $$? -eq 5 ]

setup:
	@PYTHON="$(PYTHON)" tools/setup cpu

setup-dev:
	@PYTHON="$(PYTHON)" tools/setup dev

lint: setup-dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/mypy --strict tools/setup_venv.py tools/lock.py

# Text that the program generates into the documents is what the program says now.
docs-check: setup-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cog --check $(wildcard README.md docs/*.md)

# UPGRADE=1 takes the newest versions that fit instead of keeping those that still do.
lock: setup-dev
	$(BIN)/python tools/lock.py $(if $(UPGRADE),--upgrade)

# Keeps .stamps/kept-*, a .venv that set-up did not make.
clean:
	rm -rf .venv .stamps/setup.* .stamps/discarded-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
