"""Record what PyTorch's transformers computes for the cases of families.py and wide.py: families.npz.

    python tests/reference/record_families.py [CASE ...]

Runs under an interpreter with torch and transformers (5.24.0 was used), never under the project's.
Holds for each case: the config.json that save_pretrained writes, names and shapes of the published
checkpoint's tensors, logits of uncached passes over two prompts and a greedy continuation.
Refuses a case whose logits jump when the weights move by a rounding error (a near tie in a router
or an indexer): no other implementation could be held to it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from families import CASES, GREEDY, LONG, OLD_STYLE, SHORT, STRIDE, prompt, tensor
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportMissingImports]
from wide import WIDE

HERE = Path(__file__).parent
ALL = CASES | WIDE
# Where save_pretrained does not give the published names back (from_pretrained takes both).
PUBLISHED = {"kimi_linear": [(r"\.block_sparse_moe\.(gate_proj|up_proj|down_proj)\.", r".mlp.\1.")]}
# Buffers in the file that follow from the config: no implementation need read them.
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
JUMP = 2e-3
# Checkpoints that are published with a multi-token-prediction layer.
DRAFTED = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")


def published(case: str, folder: Path) -> dict[str, list[int]]:
    """Write the case's checkpoint with drawn weights; gives its names and shapes."""
    architecture, kind, fields = ALL[case]
    config = transformers.AutoConfig.for_model(kind, **fields)
    getattr(transformers, architecture)(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    shapes, drawn = {}, {}
    for name, value in load_file(path).items():
        for pattern, replacement in PUBLISHED.get(ALL[case][1], []):
            name = re.sub(pattern, replacement, name)
        shapes[name] = list(value.shape)
        derived = name.rsplit(".", 1)[-1] in DERIVED
        drawn[name] = value if derived else tensor(case, name, value.shape)
    save_file(drawn, path, metadata={"format": "pt"})
    return shapes


def meaning(config: dict[str, Any]) -> dict[str, Any]:
    """A read config without what says nothing of the maths."""
    silent = ("_name_or_path", "architectures", "dtype", "head_dim", "initializer_range")
    silent += ("router_aux_loss_coef", "transformers_version")
    out = {k: v for k, v in config.items() if k not in silent}
    if rope := out.get("rope_parameters"):
        out["rope_parameters"] = {"partial_rotary_factor": 1.0} | rope
        out["rope_parameters"].pop("type", None)
    if out.get("position_embedding_type") is None:
        out["position_embedding_type"] = "nope"  # of Granite 4
    return out


def check_old_configs() -> None:
    """transformers must read every config of OLD_STYLE as the model of its case."""
    for case, old in OLD_STYLE:
        _, kind, fields = CASES[case]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(old))
            read = meaning(transformers.AutoConfig.from_pretrained(folder).to_dict())
        for key, value in meaning(
            transformers.AutoConfig.for_model(kind, **fields).to_dict()
        ).items():
            assert read.get(key) == value, f"{case}: {key} is {read.get(key)!r}, not {value!r}"


def draft_tensors(case: str, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Names and shapes of the published multi-token-prediction layer, which the model ignores."""
    if case not in DRAFTED:
        return {}
    layers = CASES[case][2]["num_hidden_layers"]
    last, vocab, out = f"model.layers.{layers - 1}.", shapes["lm_head.weight"], {}
    hidden = vocab[1]
    if case in ("deepseek_v3", "glm4_moe"):
        block, prefix = f"model.layers.{layers}.", f"model.layers.{layers}."
        names = ("enorm", "hnorm", "shared_head.norm")
        out |= {prefix + "embed_tokens.weight": vocab, prefix + "shared_head.head.weight": vocab}
        out[prefix + "eh_proj.weight"] = [hidden, 2 * hidden]
    else:
        block, prefix = "mtp.layers.0.", "mtp."
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        out["mtp.fc.weight"] = [hidden, 2 * hidden]
    out |= {f"{prefix}{name}.weight": [hidden] for name in names}
    return out | {block + n[len(last) :]: s for n, s in shapes.items() if n.startswith(last)}


def load(case: str, folder: Path) -> Any:
    model, info = getattr(transformers, ALL[case][0]).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def stability(model: Any, ids: list[int], expected: np.ndarray) -> float:
    """The largest change of a logit when every weight moves by a few roundings, of three tries."""
    worst = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=generator))
            worst = max(worst, float(np.abs(logits(model, ids) - expected).max()))
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
    return worst


def record(case: str) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = published(case, folder)
        config = (folder / "config.json").read_bytes()
        model = load(case, folder)
    ids, rows, margins = prompt(case, SHORT), None, []
    for _ in range(GREEDY):
        out = logits(model, ids)
        rows = out if rows is None else rows
        second, first = np.sort(out[-1])[-2:]
        margins.append(first - second)
        ids.append(int(out[-1].argmax()))
    long = logits(model, prompt(case, LONG))
    moved = stability(model, prompt(case, LONG), long)
    assert rows is not None and np.isfinite(long).all()
    print(
        f"{case:30s} max|logit|={np.abs(long).max():.1f} moved={moved:.1e}"
        f" margin={min(margins):.1e}",
        flush=True,
    )
    assert moved < JUMP, f"{case}: a choice is too near a tie: change its weights"
    positions = [*range(0, LONG, STRIDE), LONG - 1]
    shapes |= draft_tensors(case, shapes)
    return {
        "config": np.frombuffer(config, np.uint8),
        "shapes": np.frombuffer(json.dumps(shapes).encode(), np.uint8),
        "short": rows,
        "long": long[positions],
        "positions": np.asarray(positions, np.int32),
        "greedy": np.asarray(ids[SHORT:], np.int32),
        "margins": np.asarray(margins, np.float32),
    }


def main() -> int:
    torch.set_num_threads(1)
    check_old_configs()
    path = HERE / "families.npz"
    arrays = dict(np.load(path)) if sys.argv[1:] and path.exists() else {}
    failed = []
    for case in sys.argv[1:] or list(ALL):
        try:
            for key, value in record(case).items():
                arrays[f"{case}/{key}"] = value
        except Exception as error:  # the other cases are still of use
            failed.append(case)
            print(case, "FAILED", type(error).__name__, str(error)[:600], flush=True)
    np.savez_compressed(path, **arrays)
    print(f"{path.stat().st_size} bytes, failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
