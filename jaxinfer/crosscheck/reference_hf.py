"""The reference's side of the cross-check: runs Hugging Face transformers, eager, in float32.

    python reference_hf.py REQUEST.json FOLDER

Runs under an interpreter of its own (torch, transformers, safetensors; gguf for .gguf files) and never
imports the engine. Started by session.py; see `Request` there for what is read and `exchange.py` for
what is written. Prints a JSON line for each finished sequence.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

TOP = 20
MISSING = 3  # exit code: a package is missing


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    folder = Path(sys.argv[2])
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        save_file: Any = importlib.import_module("safetensors.torch").save_file
    except ImportError as error:
        print(f"{sys.executable} lacks a package: {error}", file=sys.stderr)
        return MISSING
    model = load(torch, transformers, request)
    for i, sequence in enumerate(request["sequences"]):
        with torch.no_grad():
            tensors = score(torch, model, sequence["token_ids"])
            prompt = sequence["token_ids"][: sequence["prompt_tokens"]]
            tensors |= greedy(torch, model, prompt, request["max_tokens"], set(request["eos_ids"]))
        save_file(tensors, folder / f"{i}.safetensors")
        print(json.dumps({"done": i + 1}), flush=True)
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model_class": type(model).__name__,
    }
    (folder / "versions.json").write_text(json.dumps(versions), "utf-8")
    return 0


def load(torch: Any, transformers: Any, request: dict[str, Any]) -> Any:
    """The checkpoint in float32 with eager attention; a GGUF file is dequantized by transformers."""
    path = Path(request["model"])
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.is_file():
        path, options["gguf_file"] = path.parent, path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, **options
    )
    return model.eval()


def score(torch: Any, model: Any, ids: list[int]) -> dict[str, Any]:
    """One uncached pass over `ids`: what each layer and the head make of every position."""
    last: list[Any] = []
    hook = None
    layers = decoder_layers(model)
    if layers is not None:  # hidden_states holds the last layer only after the final norm
        hook = layers[-1].register_forward_hook(lambda *call: last.append(call[-1]))
    out = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    if hook is not None:
        hook.remove()
    hidden = [h[0] for h in out.hidden_states]
    names = ["embed", *(f"layers.{i}.out" for i in range(len(hidden) - 2)), "final_norm"]
    tensors = {f"hidden.{n}": h.float().clone() for n, h in zip(names, hidden, strict=True)}
    if last:
        value = last[0][0] if isinstance(last[0], tuple) else last[0]
        tensors[f"hidden.layers.{len(hidden) - 2}.out"] = (
            value.reshape(hidden[-1].shape).float().clone()
        )
    logits = out.logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    top = torch.topk(logprobs, min(TOP, logits.shape[-1]), -1)
    following = torch.tensor(ids[1:], dtype=torch.long)[:, None]
    return tensors | {
        "top_ids": top.indices.int().contiguous(),
        "top_logprobs": top.values.float().contiguous(),
        "next_logprobs": logprobs[:-1].gather(-1, following)[:, 0].float().contiguous(),
    }


def decoder_layers(model: Any) -> Any:
    """The list of decoder layers, or None where the model names it otherwise."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if name.split(".")[-1] == "layers" and hasattr(module, "__len__") and len(module) == count:
            return module
    return None


def greedy(torch: Any, model: Any, prompt: list[int], count: int, eos: set[int]) -> dict[str, Any]:
    """The reference's own continuation, and how far its best token led the second at each step."""
    tokens: list[int] = []
    margins: list[float] = []
    feed, past = prompt, None
    while len(tokens) < count and not (tokens and tokens[-1] in eos):
        out = model(input_ids=torch.tensor([feed]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        best = torch.topk(out.logits[0, -1].double(), 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        feed = tokens[-1:]
    return {
        "greedy_ids": torch.tensor(tokens, dtype=torch.int32),
        "greedy_margins": torch.tensor(margins, dtype=torch.float32),
    }


if __name__ == "__main__":
    sys.exit(main())
