"""EngineConfig refuses what it cannot apply, by field and value; vLLM's names mean the same."""

from __future__ import annotations

from typing import Any

import pytest

import pallas_kernels
from jaxinfer.config import ALIASES, EXACT_BLOCK, FIXED, EngineConfig, engine_config
from jaxinfer.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype='int4'.*float32"),
        ({"policy": "random"}, "policy='random'.*fcfs"),
        ({"warmup": ["eager"]}, r"warmup=\['eager'\]"),
        ({"page_size": 0}, r"page_size=0.*\[1, 1024\]"),
        ({"page_size": 24}, "page_size=24.*power of two"),
        ({"page_size": True}, "page_size=True"),
        ({"num_pages": 1}, "num_pages=1"),
        ({"max_model_len": 1.5}, "max_model_len=1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens='many'"),
        ({"memory_fraction": 0.0}, r"memory_fraction=0.0.*\(0, 1\]"),
        ({"memory_fraction": float("nan")}, "memory_fraction=nan"),
        ({"memory_fraction": "half"}, "memory_fraction='half'"),
        ({"memory_fraction": True}, "memory_fraction=True"),
        ({"overlap": "no"}, "overlap='no'"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching=0"),
        ({"strict_compile": 1}, "strict_compile=1"),
        ({"strict_compile": True}, "strict_compile=True needs warmup='eager'"),
        ({"compile_cache": 5}, "compile_cache=5"),
        ({"seed": -1}, "seed=-1"),
        ({"page_sise": 16}, "page_sise=16; did you mean page_size"),
        ({"block_size": 16, "page_size": 32}, "block_size=16 and page_size=32 are two names"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2.*only 1"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True.*only 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2.*only 1"),
        ({"trust_remote_code": True}, "trust_remote_code=True.*only False"),
        ({"trust_remote_code": 0}, "trust_remote_code=0.*only False"),
        ({"enforce_eager": True}, "enforce_eager=True.*only False"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False.*only True"),
        ({"swap_space": 4}, "swap_space=4.*only 0"),
        ({"quantization": "awq"}, "quantization='awq'.*only None"),
        ({"load_format": "dummy"}, "load_format='dummy'.*only 'auto'"),
        ({"disable_log_stats": False}, "disable_log_stats=False.*only True"),
        ({"mamba_cache_mode": "all"}, "checkpoint_policy='all'.*'align'"),
        ({"mamba_cache_mode": "some"}, "checkpoint_policy='some'.*none, align"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype='bfloat16'.*only 'float32'"),
        ({"checkpoint_interval": 0}, r"checkpoint_interval=0.*\[1, "),
        ({"num_states": 1}, r"num_states=1.*\[2, "),
        ({"max_states_per_path": -1}, r"max_states_per_path=-1.*\[0, "),
        ({"replay": "bitwise"}, "replay='bitwise'.*tolerant, exact"),
        (
            {"replay": "exact", "max_num_batched_tokens": 32},
            "replay='exact'.*max_num_batched_tokens=32",
        ),
        ({"serial_weight": 0.5}, r"serial_weight=0.5.*\[1, 1024\]"),
        ({"prefill_deadline": -1}, "prefill_deadline=-1"),
        ({"tensor_paralel_size": 1}, "did you mean tensor_parallel_size"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config(**options)


@pytest.mark.parametrize("alias", ALIASES)
def test_other_names_mean_the_same(alias: str) -> None:
    values = {"page_size": 32, "num_pages": 9, "memory_fraction": 0.5, "overlap": False}
    values |= {"checkpoint_policy": "none", "checkpoint_interval": 32}
    values |= {"policy": "lpm", "max_partial_prefills": 2, "long_prefill_threshold": 64}
    name = ALIASES[alias]
    assert engine_config(**{alias: values[name]}) == EngineConfig(**{name: values[name]})


def test_harmless_values_of_other_options_change_nothing() -> None:
    assert engine_config(**{name: value for name, (value, _) in FIXED.items()}) == EngineConfig()


@pytest.mark.parametrize(("alias", "dtype"), [("half", "float16"), ("float", "float32")])
def test_other_names_of_dtypes(alias: str, dtype: str) -> None:
    assert engine_config(dtype=alias) == EngineConfig(dtype=dtype)


@pytest.mark.parametrize(
    ("options", "plain", "recurrent"),
    [
        ({}, 16, 64),
        ({"checkpoint_interval": 20}, 16, 32),
        ({"checkpoint_policy": "second-hit"}, 16, 64),
        ({"checkpoint_policy": "branch"}, 16, 16),
        ({"checkpoint_policy": "declared", "page_size": 8}, 8, 8),
        ({"checkpoint_policy": "none"}, 16, 0),
        ({"enable_prefix_caching": False}, 0, 0),
    ],
    ids=str,
)
def test_the_smallest_reusable_unit(options: dict[str, Any], plain: int, recurrent: int) -> None:
    config = EngineConfig(**options)
    assert (config.reusable_unit(False), config.reusable_unit(True)) == (plain, recurrent)


def test_exact_replay_cuts_blocks_as_the_kernel_takes_them():
    assert EngineConfig(replay="exact").block == EXACT_BLOCK == pallas_kernels.EXACT
