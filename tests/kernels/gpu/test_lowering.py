"""Every shape of the decode kernel lowered for an H200 on this machine, and what dispatch picks."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.gpu import compat
from tests.kernels.gpu.configs import EVERY, NAMED, Config


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing logged or counted yet."""
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "_fallbacks", dispatch.Counter())
    yield monkeypatch


@pytest.mark.parametrize("config", [*NAMED.values(), *EVERY], ids=repr)
def test_lowers_for_an_h200(config: Config, counted) -> None:
    with compat.abstract_gpu():
        traced = jax.jit(config.call).trace(*config.shapes())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2  # the kernel and the merge
    assert pallas_kernels.fallbacks() == {}


SMALL = Config(4, 2, 64, 16, rows=2, keys=64)
Q, POOL = SMALL.shapes()[0].shape, SMALL.shapes()[1].shape
REASONS = {
    "bfloat16, not float32": (Q, POOL, jnp.float32),
    "blocks of several queries": ((2, 5, 4, 64), POOL, jnp.bfloat16),
    "head_dim 64, 128, 256, not 80": ((*Q[:3], 80), (*POOL[:3], 80), jnp.bfloat16),
    "power of 2 from 16, not 8": (Q, (9, 2, 8, 64), jnp.bfloat16),
    "up to 64 heads a kv head, not 65": ((2, 1, 65, 64), (9, 1, 16, 64), jnp.bfloat16),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_the_kernel_cannot_take_is_counted_with_the_reason(reason, counted, caplog) -> None:
    q, pool, dtype = REASONS[reason]
    shapes = SMALL.shapes()
    shapes[:3] = [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, pool, pool)]
    with compat.abstract_gpu(), caplog.at_level(logging.WARNING, "jaxinfer.kernels"):
        for _ in range(2):
            assert "mosaic" not in str(jax.make_jaxpr(lambda *a: SMALL.call(*a))(*shapes))
    assert pallas_kernels.fallbacks() == {"paged_attention": 2}
    assert [reason in record.message for record in caplog.records] == [True]


def traced(impl: str) -> str:
    arrays = SMALL.shapes()
    call = pallas_kernels.paged_attention
    return str(jax.make_jaxpr(lambda *a: call(*a, scale=1.0, impl=impl))(*arrays))  # type: ignore[arg-type]


def test_gpus_want_it_and_cpus_only_interpret_it(counted, caplog) -> None:
    with compat.abstract_gpu():
        assert "paged_decode" in traced("auto")
        assert "paged_decode" in traced("mosaic")
        assert "paged_decode" not in traced("reference")
        assert pallas_kernels.fallbacks() == {}
        assert "paged_decode" not in traced("native")
    assert pallas_kernels.fallbacks() == {"paged_attention": 1}
    assert "paged_decode" not in traced("mosaic")
    assert pallas_kernels.fallbacks() == {"paged_attention": 2}
    assert "for GPUs, not cpu" in caplog.text
    with compat.interpreter():
        assert "paged_decode" in traced("mosaic")
    counted.setattr(dispatch, "_fallbacks", dispatch.Counter())
    pallas_kernels.rms_norm(jnp.ones((2, 8)), jnp.ones(8), 1e-6, impl="mosaic")
    assert pallas_kernels.fallbacks() == {"rms_norm": 1}
    assert "no Mosaic kernel" in caplog.text


def test_cpus_never_import_mosaic(counted) -> None:
    assert pallas_kernels.describe()["mosaic"] == "not used on this platform"
    code = (
        "import sys, jax.numpy as jnp, pallas_kernels as k; "
        "x, i = jnp.ones((1, 1, 2, 64)), jnp.zeros(1, int); "
        "k.paged_attention(x, *[jnp.ones((2, 1, 16, 64))] * 2, i[None], i, i, scale=1.0); "
        "print('jax.experimental.pallas.mosaic_gpu' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
