"""The native kernels as other x86 CPUs get them: AVX2, and 128-bit vectors without fused multiply-add.

Each build runs in a process of its own. Tile shapes differ from this machine's, so results and their
independence of the batch are checked again.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest

_CODE = """
from pathlib import Path
from pallas_kernels import native
native._FLAGS = (*native._FLAGS, *{flags!r})
native.cache_dir = lambda: Path({folder!r})
import numpy as np
from tests.kernels import test_conv, test_experts, test_latent, test_recurrent, test_sinks, test_sparse
from tests.kernels.oracle import make_case
from tests.kernels.test_attention import _prompt, check, run as attend
from tests.kernels.test_matmul import close, draw, run

for op in ("matmul", "matmul_t"):
    for k, n in ((131, 77), (96, 200), (5, 3)):
        x, w = draw(40, k, n)
        whole = run(op, x, w, "native")
        close(whole, x, w)
        for m in range(1, 20):
            np.testing.assert_array_equal(run(op, x[:m], w, "native"), whole[:m])
for seed, dim in enumerate((8, 20, 64)):
    check(make_case(seed, rows=3, queries=19, kv_heads=2, group=3, dim=dim, page=16, pages=9), "native")
case = _prompt()
q, k_pool, v_pool, tables, base, _ = case.arrays
whole = attend(case, "native")[0]
for first, count in ((0, 1), (65, 40), (699, 1)):
    start = np.array([first], np.int32)
    part = type(case)(
        (q[:, first : first + count], k_pool, v_pool, tables, base, start), case.options, case.lengths
    )
    np.testing.assert_array_equal(attend(part, "native")[0], whole[first : first + count])
test_sinks.test_contexts_longer_than_a_segment(None, "native", 40)
test_sinks.test_native_is_bitwise_the_same_however_a_prompt_is_cut(None)
test_latent.test_contexts_longer_than_a_segment(None, "native")
test_latent.test_native_is_bitwise_the_same_however_a_prompt_is_cut(None, 20)
test_sparse.test_real_scores_leave_out_nothing_better(None, "native")
test_sparse.test_native_choice_is_the_same_however_a_prompt_is_cut(None)
test_sparse.test_native_over_all_keys_is_bitwise_latent_attention(None)
for k, n in ((131, 77), (96, 200)):
    test_experts.test_native_rows_are_bitwise_those_of_the_plain_matmul(None, k, n)
for kind in test_recurrent.KINDS:
    arrays, places = test_recurrent.drawn(3, 2, 3, 17, key_heads=2, ratio=2, dk=20, dv=37, **kind)
    test_recurrent.check(arrays, places, "native")
    test_recurrent.test_native_is_bitwise_the_same_however_a_sequence_is_cut(None, kind, 24)
test_conv.check("native", 3, 2, 3, 16, 300, 4)
test_conv.test_steps_are_bitwise_a_chunk(None, "native", 300)
print("equal")
"""

_BUILDS = (
    [("-mno-avx512f",), ("-mno-avx512f", "-mno-avx")] if platform.machine() == "x86_64" else []
)


@pytest.mark.parametrize("flags", _BUILDS)
def test_narrow_vectors(
    native_kernels: str, run_python: Callable[..., str], tmp_path, flags: tuple[str, ...]
) -> None:
    assert run_python(_CODE.format(flags=flags, folder=str(tmp_path))).strip() == "equal"
