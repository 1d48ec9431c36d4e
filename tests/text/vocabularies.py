"""Small tokenizers of the kinds that real models have, built in memory.

Used by the tests of jaxinfer.text and by others that need a tokenizer with known ids.
"""

from __future__ import annotations

import codecs
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.text.tokenizer import Tokenizer

BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
MERGES = [("h", "i"), ("Ġ", "b"), ("Ġ", "l"), ("Ġl", "e"), ("a", "d"), ("Ġle", "ad"), ("Ġ", "x")]
# Merges that make tokens of several bytes, some of them not whole characters.
BYTE_MERGES = [("ð", "Ł"), ("Ã", "©"), ("ä", "¸"), ("©", "a")]


def byte_alphabet() -> list[str]:
    """The stand-ins of bytes 0 to 255, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


def byte_backend(post_bos: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE: ids 0-255 are the bytes, then the merges, then four special tokens, one not."""
    merges = MERGES + BYTE_MERGES
    words = byte_alphabet() + [a + b for a, b in merges]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t) for t in (BOS, EOS, IM_START, IM_END)])
    backend.add_tokens([AddedToken("</think>", normalized=False)])
    if post_bos:
        bos = backend.token_to_id(BOS)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, bos)]
        )
    return backend


def byte_tokenizer(post_bos: bool = False, add_bos: bool | None = None) -> Tokenizer:
    return Tokenizer(byte_backend(post_bos), bos_token=BOS, eos_token=EOS, add_bos=add_bos)


def token_id(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None, text
    return token


def sentencepiece_tokenizer(strip: bool = True, metaspace: bool = False) -> Tokenizer:
    """SentencePiece-like BPE: unknown characters fall back to bytes, "▁" stands for a space.

    Ids: 0 <unk>, 1 <s>, 2 </s>, 3-258 the bytes, then pieces. `strip` drops the first space as
    Llama 2 does (Gemma does not); `metaspace` uses the Metaspace decoder instead.
    """
    pieces = ["▁", "l", "e", "a", "d", "x", "é", "▁lead", "lead", "▁x", "▁▁", "ad", "ead"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    merges = [("a", "d"), ("e", "ad"), ("l", "ead"), ("▁", "lead"), ("▁", "x"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Metaspace() if metaspace else decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    special = {"unk_token": "<unk>"}
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>", special_tokens=special)


def count_decoding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes given to each call of the decoders that tokenizers make from now on."""
    made, sizes = Tokenizer.utf8_decoder, []

    class Counted(codecs.IncrementalDecoder):
        def __init__(self, inner: codecs.IncrementalDecoder) -> None:
            super().__init__(inner.errors)
            self._inner = inner

        def decode(self, input: Any, final: bool = False) -> str:
            sizes.append(len(input))
            return self._inner.decode(input, final)

        def getstate(self) -> tuple[bytes, int]:
            return self._inner.getstate()

    monkeypatch.setattr(Tokenizer, "utf8_decoder", lambda self: Counted(made(self)))
    return sizes
