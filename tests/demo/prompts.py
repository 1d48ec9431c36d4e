"""Writes the token ids of the 20 default cross-check prompts, for record.py to feed to transformers.

    python -m tests.demo.prompts FILE

Runs under the project's interpreter: ids are exchanged, never text. Also used by test_demo.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxinfer import LLM
from jaxinfer.crosscheck.prompts import NamedPrompt, load_prompts

MAX_TOKENS = 64
MAX_MODEL_LEN = 2048


def demo_prompts(llm: LLM) -> list[NamedPrompt]:
    prompts, skipped = load_prompts(llm, None, MAX_TOKENS)
    assert not skipped, f"these prompts do not fit: {skipped}"
    return prompts


def main() -> int:
    llm = LLM("smollm2-135m", max_model_len=MAX_MODEL_LEN)
    items = [{"name": p.name, "token_ids": p.token_ids} for p in demo_prompts(llm)]
    Path(sys.argv[1]).write_text(json.dumps(items), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
