# Everything a user or a contributor does:
# make demo | demo-plan | head | quick | test | check | sanitize | test-arm | test-amx | package | wheels | test-slow | test-emitted | test-gpu | soak | bench | format | clean
# make test-gpu | soak-gpu | sanitize-gpu, on a machine with an NVIDIA GPU
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode is made of what is imported, when it is, and kept: of all that is installed it takes a minute (hence --no-compile). What
# each start imports is imported once at the end of the installation.
unexport PYTHONDONTWRITEBYTECODE
# Where pip finds torch's CPU build if your index does not offer it; see pytorch.org, "Start locally".
TORCH_INDEX ?=

CHECKS := check-style check-types check-imports check-words check-docs

.PHONY: install demo demo-plan head quick test sanitize test-arm test-amx test-slow test-emitted test-gpu soak-gpu sanitize-gpu soak check $(CHECKS) package wheels bench format clean

# Three processes for two cores, as tests wait much of their time; each has a third of the rooms in order until it has none left,
# so that what a room's tests share is made once.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

# The rooms that a change of the step touches; `make test` runs all.
QUICK := $(wildcard $(addprefix tests/,core kv verify engine executor ops grammar))

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/forerun/ops/native/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, got " + sys.version.split()[0] + "; run make PYTHON=python3.12, say") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv"; exit 2; }
	@$(BIN)/pip --version >/dev/null || { echo "the virtual environment has no pip; on Debian or Ubuntu: apt install python3-venv, then make clean"; exit 2; }
	BIN=$(BIN) TORCH_INDEX=$(TORCH_INDEX) sh scripts/install_torch.sh
	$(BIN)/pip install --disable-pip-version-check --no-compile -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'import forerun.cli.generate, forerun.cli.program, forerun.llm, transformers'
	@touch $@

demo: install
	$(BIN)/forerun demo

# SLA=ttft=...,itl=... is its latency target.
demo-plan: install
	BIN=$(BIN) SLA=$(SLA) sh scripts/demo_plan.sh

# The head that the package carries for the default model, anew: hours.
head: install
	$(BIN)/python scripts/make_head.py

quick: install
	$(PYTEST) $(QUICK)

test: install
	$(PYTEST)

sanitize: install
	BIN=$(BIN) sh scripts/sanitize_kernels.sh

test-arm: install
	BIN=$(BIN) sh scripts/test_arm.sh

test-amx: install
	BIN=$(BIN) sh scripts/test_amx.sh

# Tests that other systems take part in are skipped where these are not installed, each in an environment of its own:
# .venv/bin/python -m benchmarks.peers install, and make test-emitted for those that read launch files.
test-slow: install
	$(BIN)/forerun models pull smollm2-135m
	$(BIN)/python -m pytest -m slow

# What forerun emit writes, read by the parsers of the systems themselves; installs those: some gigabytes.
test-emitted: install
	$(BIN)/forerun models pull smollm2-135m
	$(BIN)/python -m benchmarks.peers install vllm sglang dynamo dynamo_1_6 ray ray_2_56 manifests
	$(BIN)/python -m pytest -m slow tests/slow/test_emitted_files.py tests/slow/test_dynamo.py

# One NVIDIA GPU: the kernels against their twins on it, and a row's bits.
test-gpu: install
	$(BIN)/python -m pytest -m "not slow" -n 0 tests/ops/cuda tests/gpu

# The same GPU for an hour or two: ten minutes of requests, and a thousand prompts with each drafter.
soak-gpu: install
	$(BIN)/python -m pytest -m "gpu and slow" -n 0 tests/gpu

sanitize-gpu: install
	BIN=$(BIN) sh scripts/sanitize_gpu.sh

soak: install
	$(BIN)/forerun models pull smollm2-135m
	SOAK_SECONDS=900 $(BIN)/python -m pytest -m slow tests/slow/test_soak.py

# Each computes on one core: make -j2 check
check: $(CHECKS)

check-style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: install
	$(BIN)/mypy

check-imports: install
	$(BIN)/lint-imports
	$(BIN)/deptry src

check-words: install
	$(BIN)/codespell src tests docs examples benchmarks README.md

check-docs: install
	$(BIN)/python -m pytest docs README.md

package: install
	BIN=$(BIN) TORCH_INDEX=$(TORCH_INDEX) sh scripts/check_package.sh

wheels: install
	BIN=$(BIN) sh scripts/build_wheels.sh

bench: install
	$(BIN)/forerun models pull smollm2-135m
	$(BIN)/python -m benchmarks.host_overhead
	$(BIN)/python -m benchmarks.server_throughput
	$(BIN)/forerun bench compare smollm2-135m --configs benchmarks/configs/free-drafters.yaml
	$(BIN)/forerun bench curve smollm2-135m --contexts 256

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
