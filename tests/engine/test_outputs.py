"""What RequestState makes of the core's numbers."""

from __future__ import annotations

import numpy as np

from jaxinfer.inputs import Prompt
from jaxinfer.outputs import RequestState
from jaxinfer.types import Request, SamplingParams
from tests.text.vocabularies import sentencepiece_tokenizer, token_id


def test_a_listed_token_keeps_its_leading_space():
    """Decoded alone, a SentencePiece token would lose it."""
    tokenizer = sentencepiece_tokenizer()
    token = token_id(tokenizer, "▁lead")
    assert tokenizer.decode([token]) == "lead"
    params = SamplingParams(logprobs=1)
    request = Request("r", (1,), params, frozenset(), (), max_tokens=1, seed=0)
    state = RequestState("r", Prompt(None, (1,)), [request], tokenizer)
    ids = np.full(20, token, np.int32)
    entry = state._entry(token, (-0.5, 1, ids, np.full(20, -0.5, np.float32)), 1)
    assert entry[token].decoded_token == " lead"
