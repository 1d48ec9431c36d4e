"""Record what transformers gives as log-likelihoods of the choices in choice.jsonl, into recorded.json.

    python tests/integration/lm_eval/record.py MODEL.gguf

Runs under an interpreter with torch and transformers (5.24.0 was used), never imports the engine. The
boundary between context and continuation is lm-eval's: tokens of the whole beyond those of the context.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent


def main() -> int:
    path = Path(sys.argv[1])
    where = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **where
    ).eval()
    found = []
    for line in (HERE / "choice.jsonl").read_text(encoding="utf-8").splitlines():
        doc = json.loads(line)
        rows = []
        for choice in doc["choices"]:
            context = tokenizer.encode(doc["question"], add_special_tokens=False)
            whole = tokenizer.encode(f"{doc['question']} {choice}", add_special_tokens=False)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([whole])).logits[0].double()
            logprobs = torch.log_softmax(logits, -1)
            at = range(len(context), len(whole))
            total = sum(float(logprobs[i - 1, whole[i]]) for i in at)
            greedy = all(int(logprobs[i - 1].argmax()) == whole[i] for i in at)
            rows.append([round(total, 6), greedy])
        found.append(rows)
    (HERE / "recorded.json").write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
