# The project's commands; each sets up what it needs first. POSIX sh only.
.POSIX:
.PHONY: setup run test test-clients test-gpu-compile check bench clean

BIN = .venv/bin
QUESTION = What is the capital of France?

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt .ci/setup
	@sh .ci/setup

# A real model answers a question on the CPU.
run: setup
	@$(BIN)/jaxinfer generate --model smollm2-135m --chat --prompt "$(QUESTION)" --temperature 0 --max-tokens 32

# Everything that runs on a CPU in minutes: first what only computes, two files at a time, then the servers,
# some of whose tests look at the clock. The tests on real weights need the demo model: it is fetched once;
# where it cannot be had, the rest still runs.
test: setup
	@marks="not slow and not gpu and not gpu_compile and not torch and not clients"; \
	if ! $(BIN)/python -c "from jaxinfer.weights.demo import fetch_demo; fetch_demo()"; then \
		marks="$$marks and not demo"; \
		echo "test: the demo model could not be fetched, so the tests marked 'demo' are left out"; \
	fi; \
	rc=0; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore=tests/serving -m "$$marks" || rc=1; \
	$(BIN)/python -m pytest -q -m "$$marks" tests/serving || rc=1; \
	exit $$rc

# Gateways, clients, fuzzers and evaluators of other projects drive our servers: some 5 minutes after
# 2 of installing. What this machine lacks is left out by name.
test-clients: setup
	@sh .ci/clients .venv-clients
	@marks=clients; \
	if ! $(BIN)/python -c "from jaxinfer.weights.demo import fetch_demo; fetch_demo()"; then \
		marks="$$marks and not demo"; \
		echo "test-clients: the demo model could not be fetched, so the evaluators are left out"; \
	fi; \
	names=; \
	if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then \
		names="$${names:+$$names and }not a_browser"; \
		echo "test-clients: Chromium could not be had, so the tests in a browser are left out"; \
	fi; \
	if ! unshare -rn ip link set lo up 2>/dev/null; then \
		names="$${names:+$$names and }not test_dynamo"; \
		echo "test-clients: no network namespace (unshare -rn), so Dynamo's indexer is left out"; \
	fi; \
	$(BIN)/python -m pytest -q -m "$$marks" -k "$$names" --clients=.venv-clients --durations=10

# The GPU kernels with the JAX of the GPU machines: interpreted, lowered, and compiled for an H200
# without one: some 3 minutes after 2 of installing.
test-gpu-compile:
	@sh .ci/gpu-compile .venv-gpu
	@.venv-gpu/bin/python -m pytest -q -m "gpu_compile or not slow" tests/kernels/gpu --durations=5

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -q tests/test_architecture.py

# This machine, and the CPU peers that are set up (bench/peers/README.md).
bench: setup
	@$(BIN)/python bench/compare.py

clean:
	@rm -rf .venv .venv-clients .venv-gpu .pytest_cache .ruff_cache .hypothesis build dist
