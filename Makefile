# The project's commands; each sets up what it needs first. POSIX sh only.
.POSIX:
.PHONY: setup run test check bench clean

BIN = .venv/bin
QUESTION = What is the capital of France?

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt .ci/setup
	@sh .ci/setup

# A real model answers a question on the CPU.
run: setup
	@$(BIN)/jaxinfer generate --model smollm2-135m --chat --prompt "$(QUESTION)" --temperature 0 --max-tokens 32

# Everything that runs on a CPU in minutes. The tests on real weights need the demo model: it is
# fetched once; where it cannot be had, the rest still runs.
test: setup
	@marks="not slow and not gpu and not torch and not clients"; \
	if ! $(BIN)/python -c "from jaxinfer.weights.demo import fetch_demo; fetch_demo()"; then \
		marks="$$marks and not demo"; \
		echo "test: the demo model could not be fetched, so the tests marked 'demo' are left out"; \
	fi; \
	$(BIN)/python -m pytest -q -m "$$marks"

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -q tests/test_architecture.py

# This machine, and the CPU peers that are set up (bench/peers/README.md).
bench: setup
	@$(BIN)/python bench/compare.py

clean:
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
