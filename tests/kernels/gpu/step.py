"""Compiles whole decode steps of models for an H200; run as a program by test_compiled.py.

`python -m tests.kernels.gpu.step FOLDER` prints one JSON line a model: how often the attention
kernel is in the step, how many bytes the step updates in place and how many it needs besides.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.kernels.gpu.h200 import compile_for_h200, prepare

ROWS, PAGE, KEYS = 32, 16, 4096
LLAMA = {  # Llama 3.2 1B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MODELS = {"Llama 3.2 1B": LLAMA}


def decode_step(raw: dict[str, Any]) -> tuple[Any, list[Any], int]:
    """(step, the shapes of its arguments, bytes of its state) for ROWS sequences of KEYS tokens."""
    import functools

    import jax
    import jax.numpy as jnp

    from jaxinfer import configs
    from jaxinfer.layout import RecordLayout, StepShape
    from jaxinfer.models.registry import get_family
    from jaxinfer.params import ParamSpec
    from jaxinfer.step.forward import StepModel, step
    from jaxinfer.step.pack import buffer_size
    from jaxinfer.step.state import DeviceState, cache_shapes

    config = configs.read(raw)
    family = get_family(config)
    specs = family.cache_specs(config, "bfloat16")
    layout = RecordLayout((KEYS // PAGE,) * len(specs), ())
    model = StepModel(config, family, specs, layout, PAGE)
    shape = StepShape(ROWS, 0, 64)
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or "bfloat16")),
        family.param_specs(config),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )
    pages = (ROWS * KEYS // PAGE + 1,) * len(specs)
    caches = cache_shapes(specs, pages, PAGE, len(config.layers))
    slots = (ROWS + 1, config.vocab_size)
    make: Any = DeviceState  # of shapes, not of arrays
    state = make(
        caches=caches,
        last_token=jax.ShapeDtypeStruct(slots[:1], jnp.int32),
        counts=jax.ShapeDtypeStruct(slots, jnp.int32),
        bias=jax.ShapeDtypeStruct(slots, jnp.float32),
    )
    buffer = jax.ShapeDtypeStruct((buffer_size(shape, layout),), jnp.int32)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return functools.partial(step, model, shape), [params, state, buffer], held


def main() -> None:
    import pallas_kernels

    for name, raw in MODELS.items():
        start = time.perf_counter()
        function, shapes, held = decode_step(raw)
        compiled = compile_for_h200(function, shapes, donate_argnums=1)
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        report = {
            "name": name,
            "layers": raw["num_hidden_layers"],
            "kernels": text.count('custom_call_target="mosaic_gpu'),
            "state_bytes": held,
            "alias_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "fallbacks": pallas_kernels.fallbacks(),
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
    main()
