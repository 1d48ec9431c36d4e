"""Text to token ids and back: the `tokenizers` library with the facts that serving needs.

Knows the BOS rule, which ids are special, and the bytes of every token, so that detokenization is
a table look-up. What ends a text is the checkpoint's to say. Never reads the network, never imports
transformers, never truncates or pads. Called by loading.py, the engine's front ends and the detokenizer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.text.detokenizer import Detokenizer

REPLACEMENT = "\ufffd"
MAX_TOKEN_ID = 2**31 - 1
LONG_TEXT = 1 << 14  # characters
NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# What these do to a token depends on the tokens around it, so no table of pieces can exist.
UNSUPPORTED_DECODERS = frozenset({"CTC", "BPEDecoder"})

_PER_BYTE = "jaxinfer.mark_per_byte"


def _mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _mark_per_byte)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-in for each byte: printable Latin-1 is itself, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class _Pieces(dict[int, bytes]):
    """Token id -> the UTF-8 bytes it adds when it is not the first token. Filled on first use."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, byte_level: bool, byte_fallback: bool):
        super().__init__()
        self._tokenizer, self._byte_level = tokenizer, byte_level
        self._byte_fallback = byte_fallback

    def __missing__(self, token: int) -> bytes:
        piece = self._compute(_checked_id(token))
        self[token] = piece
        return piece

    def _compute(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:  # padding rows of the embedding: no text
            return b""
        if self._byte_fallback and (byte := _fallback_byte(name)) is not None:
            return bytes([byte])
        alone = self._tokenizer.decode([token], skip_special_tokens=False)
        if self._byte_level:
            if REPLACEMENT not in alone:
                return alone.encode()
            if all(c in _BYTE_OF_CHAR for c in name):
                return bytes(_BYTE_OF_CHAR[c] for c in name)
            return name.encode()
        # The second of two equal tokens is free of what the decoder does to a text's start.
        twice = self._tokenizer.decode([token, token], skip_special_tokens=False)
        return twice[len(alone) :].encode()


def _fallback_byte(name: str) -> int | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None


def _checked_id(token: int) -> int:
    if not 0 <= token <= MAX_TOKEN_ID:
        raise InvalidRequest(f"token id {token} is out of range [0, {MAX_TOKEN_ID}]")
    return token


class Tokenizer:
    """A `tokenizers.Tokenizer` (owned from here on) and what is known about its special tokens.

    Args:
        tokenizer: the ready tokenizer; truncation and padding are switched off.
        bos_token: text of the begin-of-text token, or None.
        eos_token: text of the end-of-text token that templates use, or None.
        add_bos: True: every prompt gets one BOS. False: none. None: as the post-processor says.
        special_tokens: further names for chat templates ("unk_token" -> text).

    Raises:
        ConfigError: a named token is not in the vocabulary, or the decoder is not supported.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.backend = tokenizer
        self.bos_token, self.eos_token, self.add_bos = bos_token, eos_token, add_bos
        named = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        self.special_tokens = {name: text for name, text in named.items() if text is not None}
        _mark_special(tokenizer, self.special_tokens.values())
        self.bos_id = self._named_id("bos_token", bos_token)
        self._named_id("eos_token", eos_token)  # refuses one that is not in the vocabulary
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        if add_bos and self.bos_id is None:
            raise ConfigError("add_bos=True needs bos_token; give its text, or set add_bos=False")
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        kinds = _decoder_kinds(tokenizer)
        self._mark_per_byte = "ByteFallback" in kinds
        self.pieces: Mapping[int, bytes] = _Pieces(
            tokenizer, "ByteLevel" in kinds, "ByteFallback" in kinds
        )

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and what the folder's other configs say about special tokens."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"tokenizer path={str(path)!r} has no tokenizer.json; point to a model folder"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"tokenizer.json in {str(path)!r} cannot be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        names = _read_json(folder / "special_tokens_map.json")
        names |= {key: value for key, value in config.items() if value is not None}
        _add_tokens(backend, config)
        _mark_special(backend, map(_token_text, names.get("additional_special_tokens") or ()))
        texts = {name: _token_text(names.get(name)) for name in NAMED_SPECIALS}
        known = {k: v for k, v in texts.items() if v and backend.token_to_id(v) is not None}
        bos_token = known.pop("bos_token", None)
        add_bos = config.get("add_bos_token")
        return cls(
            backend,
            bos_token=bos_token,
            eos_token=known.pop("eos_token", None),
            add_bos=None if add_bos is None or bos_token is None else bool(add_bos),
            special_tokens=known,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it become their ids.

        The BOS rule: with `add_special_tokens` a prompt starts with one BOS if the model wants one,
        also when the text already spells it. Rendered chat templates are encoded with
        `add_special_tokens=False`, as they spell all of their special tokens.

        Raises:
            InvalidRequest: text is no str, or holds lone surrogates.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt must be a string, not {type(text).__name__}")
        ids = encode_ids(self.backend, text, add_special_tokens)
        return self._with_bos_rule(text, ids) if add_special_tokens else ids

    def _with_bos_rule(self, text: str, ids: list[int]) -> list[int]:
        bos = self.bos_id
        if bos is None or self.bos_token is None:
            return ids
        spelled = text.startswith(self.bos_token)
        if spelled and ids[:2] == [bos, bos] and not text.startswith(self.bos_token * 2):
            return ids[1:]
        if self.add_bos and ids[:1] != [bos]:
            return [bos, *ids]
        if self.add_bos is False and not spelled and ids[:1] == [bos]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD. Equals the joined stream."""
        stream = Detokenizer(self, skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """A new incremental decoder: byte-fallback vocabularies get one mark per broken byte."""
        return codecs.getincrementaldecoder("utf-8")(
            _PER_BYTE if self._mark_per_byte else "replace"
        )

    def first_piece(self, token: int) -> bytes:
        """The bytes of `token` as the first of a text (SentencePiece drops the leading space)."""
        alone = self.backend.decode([_checked_id(token)], skip_special_tokens=False)
        return self.pieces[token] if REPLACEMENT in alone else alone.encode()

    def token_text(self, token: int) -> str:
        """Text of one token for logprob listings; broken characters become U+FFFD."""
        return self.pieces[token].decode(errors="replace")

    def id_to_token(self, token: int) -> str | None:
        return self.backend.id_to_token(_checked_id(token))

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def _named_id(self, name: str, text: str | None) -> int | None:
        if text is None:
            return None
        token = self.backend.token_to_id(text)
        if token is None:
            raise ConfigError(f"{name}={text!r} is not in the tokenizer's vocabulary")
        return token


def encode_ids(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False
) -> list[int]:
    """Token ids of `text`; while a long one is encoded, other threads run.

    Raises InvalidRequest if it holds lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"prompt has a lone surrogate at character {error.start}; send valid Unicode text"
        ) from None
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    # Only the batch call releases Python's lock.
    (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoded.ids


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str | None]) -> None:
    """Make tokens of the vocabulary special that are not yet, so that decoding can skip them."""
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    missing = [t for t in texts if t and t not in special and backend.token_to_id(t) is not None]
    if missing:
        backend.add_special_tokens([AddedToken(t, normalized=False) for t in missing])


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> frozenset[str]:
    """The types of decoder in use; ConfigError for one whose pieces depend on their neighbours."""
    decoder = tokenizer.decoder
    if decoder is None:
        return frozenset()
    found: set[str] = set()

    def walk(node: dict[str, Any]) -> None:
        if node["type"] == "Sequence":
            for child in node["decoders"]:
                walk(child)
        else:
            found.add(node["type"])

    walk(json.loads(decoder.__getstate__()))
    bad = found & UNSUPPORTED_DECODERS
    if "ByteLevel" in found:
        bad = found - {"ByteLevel", "Fuse"}
    if bad:
        raise ConfigError(
            f"tokenizer decoder {sorted(found)} cannot be streamed (because of {sorted(bad)}); "
            "supported are ByteLevel, ByteFallback, Metaspace, Strip, Replace, Fuse and WordPiece"
        )
    return frozenset(found)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file.name} must hold a JSON object, not {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """A special token is written as its text, or as an object with "content"."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, or knows to be special, in id order."""
    present = backend.get_added_tokens_decoder()
    entries = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        text, known = _token_text(entry), present.get(int(key))
        if text is None or (known and known.special >= bool(entry.get("special"))):
            continue
        flags = {
            k: bool(entry[k])
            for k in ("lstrip", "rstrip", "single_word", "normalized")
            if k in entry
        }
        token = AddedToken(text, special=bool(entry.get("special")), **flags)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(text) != int(key):
            raise ConfigError(
                f"tokenizer_config.json says {text!r} is id {key}, but tokenizer.json makes it "
                f"{backend.token_to_id(text)}; the two files do not belong together"
            )
