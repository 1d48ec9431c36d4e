"""CacheSpec: bytes of tokens, pages and slots, counted by hand."""

from __future__ import annotations

from jaxinfer.cache import CacheSpec, Field, Scope


def test_bytes_of_a_paged_kind():
    fields = (Field("k", (8, 128), "bfloat16"), Field("v", (8, 128), "bfloat16"))
    spec = CacheSpec("full", Scope.TOKEN, (0, 2, 5), fields)
    assert spec.paged
    assert spec.bytes_per_token() == 3 * 2 * 8 * 128 * 2
    assert spec.bytes_per_page(16) == 16 * spec.bytes_per_token()


def test_a_page_of_compressed_entries_has_one_for_each_unit():
    spec = CacheSpec("c128", Scope.TOKEN, (0, 1), (Field("latent", (1, 9), "int8"),), unit=128)
    assert spec.bytes_per_page(256) == 2 * 2 * 9
    assert spec.bytes_per_token() == 0  # less than a byte; count pages


def test_bytes_of_a_slot():
    fields = (Field("conv", (3, 64), "bfloat16"), Field("state", (4, 16, 32), "float32"))
    spec = CacheSpec("recurrent", Scope.STATE, (1, 3), fields)
    assert not spec.paged
    assert spec.bytes_per_slot() == 2 * (3 * 64 * 2 + 4 * 16 * 32 * 4)


def test_window_kinds_are_paged():
    assert CacheSpec("w", Scope.WINDOW, (0,), (), window=4).paged
