"""Contestant: llama.cpp through llamacpp.c (--library). --model is a GGUF file."""

from __future__ import annotations

import ctypes

from protocol import arguments, measure

args = arguments(__doc__)
library = ctypes.CDLL(args.library)
if library.peer_load(args.model.encode(), args.threads):
    raise SystemExit(f"llama.cpp could not load {args.model}")


def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
    rows, length = len(prompts), len(prompts[0])
    # One context serves every call with this many rows; single rows also see the prompt and the question.
    room = max(length + count, args.ctx + args.gen, args.prompt_len + 1 if rows == 1 else 0)
    flat = (ctypes.c_int32 * (rows * length))(*(token for row in prompts for token in row))
    out = (ctypes.c_int32 * (rows * count))()
    status = library.peer_generate(rows, length, room, flat, count, out)
    if status:
        raise SystemExit(f"llama.cpp: llama_decode returned {status}")
    return [list(out[row * count : (row + 1) * count]) for row in range(rows)]


measure(args, "llama.cpp", "b11434", generate)
