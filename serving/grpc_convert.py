"""Between vllm.grpc.engine messages and our values: sampling parameters and prompts in, replies out.

Proto3 zeros mean "not set" where the service defines it so. What the engine cannot do is refused by
its field's name. Never touches the engine. Called by grpc_engine.py.
"""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxinfer.errors import InvalidRequest
from jaxinfer.types import MAX_TOKEN_LIST, CompletionOutput, Logprob, RequestOutput, SamplingParams
from serving.config import Limits
from serving.errors import BadField

PromptLogprobs = list[dict[int, Logprob] | None]


class ConstraintRefused(BadField):
    """A grammar that the engine does not apply. The trailer tells gateways what was refused."""

    trailers = (("smg-constraint-failed", "engine"),)


def check_supported(request: pb.GenerateRequest) -> None:
    """Refuse the fields of a request that ask for what this engine does not have."""
    refused = {
        "mm_inputs": "the model reads text only",
        "media_refs": "the model reads text only",
        "kv_transfer_params": "prefill and decode run in one process",
        "kv_transfer_params_json": "prefill and decode run in one process",
    }
    for name, why in refused.items():
        if request.HasField(name):  # pyright: ignore[reportArgumentType]
            raise BadField(name, f"{name} is not supported: {why}; leave it out")
    if request.extra_mm_inputs:
        raise BadField("extra_mm_inputs", "extra_mm_inputs is not supported; leave it out")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise BadField(
            "data_parallel_rank",
            f"data_parallel_rank={request.data_parallel_rank} does not exist; rank 0 is the only one",
        )
    constraint = request.sampling_params.WhichOneof("constraint")
    if constraint and (constraint != "json_object" or request.sampling_params.json_object):
        raise ConstraintRefused(
            constraint, f"{constraint}: structured output is not supported; leave it out"
        )


def sampling_params(p: pb.SamplingParams, limits: Limits) -> SamplingParams:
    """The parameters of a request. Raises InvalidRequest for values out of range.

    The text never leaves through this service: spaces_between_special_tokens is of no effect, and
    text is made only to find stop strings.
    """
    if p.n > limits.outputs:
        raise BadField("n", f"n={p.n} is out of range [1, {limits.outputs}]")
    for name, most in (
        ("stop", limits.stop_strings),
        ("stop_token_ids", MAX_TOKEN_LIST),
        ("logit_bias", MAX_TOKEN_LIST),
    ):
        if (count := len(getattr(p, name))) > most:  # before anything copies it
            raise BadField(name, f"{name} has {count} entries; at most {most} are allowed")

    def optional(name: Any) -> Any:
        return getattr(p, name) if p.HasField(name) else None

    seed = optional("seed")
    return SamplingParams(
        n=p.n or 1,
        temperature=p.temperature if p.HasField("temperature") else 1.0,
        top_p=p.top_p or 1.0,
        top_k=p.top_k,
        min_p=p.min_p,
        frequency_penalty=p.frequency_penalty,
        presence_penalty=p.presence_penalty,
        repetition_penalty=p.repetition_penalty or 1.0,
        max_tokens=optional("max_tokens"),
        min_tokens=p.min_tokens,
        stop=list(p.stop),
        stop_token_ids=list(p.stop_token_ids),
        include_stop_str_in_output=p.include_stop_str_in_output,
        skip_special_tokens=p.skip_special_tokens,
        ignore_eos=p.ignore_eos,
        logit_bias=dict(p.logit_bias) or None,
        logprobs=optional("logprobs"),
        prompt_logprobs=optional("prompt_logprobs"),
        seed=None if seed is None else seed % 2**32,  # gateways cut longer seeds to an int32
        detokenize=bool(p.stop),
    )


def truncation(p: pb.SamplingParams, max_model_len: int) -> int | None:
    """How many of a prompt's last tokens are kept; None: all. -1: as many as leave room for output."""
    if not p.HasField("truncate_prompt_tokens"):
        return None
    keep = p.truncate_prompt_tokens
    if keep == -1:
        return max(1, max_model_len - (p.max_tokens if p.HasField("max_tokens") else 1))
    if keep < 1:
        raise BadField(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens={keep} must be -1 (what fits) or at least 1",
        )
    return keep


class Replies:
    """The messages of one request.

    Args:
        stream: chunks with what is new, then a complete for each output; else the completes alone.
    """

    def __init__(self, params: SamplingParams, stream: bool) -> None:
        self._stream = stream
        self._top = params.logprobs or 0
        self._prompt_top = params.prompt_logprobs or 0
        self._tokens: list[list[int]] = [[] for _ in range(params.n)]
        self._prompt: pb.InputLogProbs | None = None
        self._untold = set(range(params.n))  # outputs that did not get the prompt's logprobs yet

    def take(self, item: RequestOutput) -> list[pb.GenerateResponse]:
        """What to send for one item of the stream."""
        if item.prompt_logprobs is not None:
            self._prompt = _input_logprobs(
                item.prompt_token_ids, item.prompt_logprobs, self._prompt_top
            )
        messages = []
        for output in item.outputs:
            self._tokens[output.index] += output.token_ids
            if self._stream:
                messages.append(self._chunk(item, output))
            if output.finish_reason is not None:
                messages.append(self._complete(item, output))
        return messages

    def _chunk(self, item: RequestOutput, output: CompletionOutput) -> pb.GenerateResponse:
        chunk = pb.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=len(item.prompt_token_ids),
            completion_tokens=len(output.token_ids),
            cached_tokens=item.num_cached_tokens,
            output_logprobs=_output_logprobs(output, self._top),
            input_logprobs=self._input_logprobs(output.index),
            index=output.index,
        )
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, item: RequestOutput, output: CompletionOutput) -> pb.GenerateResponse:
        tokens = self._tokens[output.index]
        complete = pb.GenerateComplete(
            output_ids=tokens,
            finish_reason=output.finish_reason,
            prompt_tokens=len(item.prompt_token_ids),
            completion_tokens=len(tokens),
            cached_tokens=item.num_cached_tokens,
            output_logprobs=None if self._stream else _output_logprobs(output, self._top),
            input_logprobs=self._input_logprobs(output.index),
            index=output.index,
        )
        match output.stop_reason:
            case int(token):
                complete.matched_token_id = token
            case str(text):
                complete.matched_stop_str = text
        return pb.GenerateResponse(complete=complete)

    def _input_logprobs(self, index: int) -> pb.InputLogProbs | None:
        """The prompt's, in the first message of an output that can have them."""
        if self._prompt is None or index not in self._untold:
            return None
        self._untold.discard(index)
        return self._prompt


def aborted(prompt_tokens: int, n: int) -> list[pb.GenerateResponse]:
    """The end of a request that was aborted before it began."""
    return [
        pb.GenerateResponse(
            complete=pb.GenerateComplete(
                finish_reason="abort", prompt_tokens=prompt_tokens, index=index
            )
        )
        for index in range(n)
    ]


def _top_logprobs(entry: dict[int, Logprob] | None, count: int) -> pb.TopLogProbs:
    """The `count` most likely tokens of a position."""
    best = sorted((entry or {}).items(), key=lambda pair: pair[1].rank or 0)[:count]
    return pb.TopLogProbs(
        values=[logprob.logprob for _, logprob in best], token_ids=[token for token, _ in best]
    )


def _output_logprobs(output: CompletionOutput, top: int) -> pb.OutputLogProbs | None:
    if output.logprobs is None:
        return None
    pairs = list(zip(output.token_ids, output.logprobs, strict=True))
    return pb.OutputLogProbs(
        token_logprobs=[entry[token].logprob for token, entry in pairs],
        token_ids=output.token_ids,
        top_logprobs=[_top_logprobs(entry, top) for _, entry in pairs] if top else [],
    )


def _input_logprobs(ids: list[int], entries: PromptLogprobs, top: int) -> pb.InputLogProbs:
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(value=None if entry is None else entry[token].logprob)
            for token, entry in zip(ids, entries, strict=True)
        ],
        token_ids=ids,
        top_logprobs=[_top_logprobs(entry, top) for entry in entries] if top else [],
    )


def prompt_ids(request: pb.GenerateRequest, keep: int | None, max_model_len: int) -> list[int]:
    """The token ids of a request, cut to the last `keep`. Lists that cannot fit are not copied."""
    ids = request.tokenized.input_ids
    if keep is not None:
        return list(ids[-keep:])
    if len(ids) > max_model_len:
        raise InvalidRequest(
            f"tokenized.input_ids has {len(ids)} ids; allowed range [1, {max_model_len}] (max_model_len)"
        )
    return list(ids)
