"""From KServe v2 tensors and parameters to a prompt and sampling parameters, and texts back to a tensor.

Sizes are checked before anything is copied; an unknown tensor or parameter is refused by name. Imports no
generated stubs: messages come in ready. Called by kserve.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.types import SamplingParams
from serving.config import Limits
from serving.errors import BadField

INTEGERS = frozenset({"max_tokens", "min_tokens", "top_k", "n", "seed"})
NUMBERS = frozenset({
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
})  # fmt: skip
FLAGS = frozenset({"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"})
LISTS = frozenset({"stop", "stop_token_ids"})
OPTIONS = INTEGERS | NUMBERS | FLAGS | LISTS
FINAL = "triton_enable_empty_final_response"
TENSORS = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for. `empty_final`: end a stream with an empty reply that says so."""

    text: str
    params: SamplingParams
    stream: bool
    empty_final: bool


def read(request: Any, limits: Limits) -> Asked:
    """Read a ModelInferRequest. Raises InvalidRequest naming the tensor or parameter."""
    if any(output.name != "text_output" for output in request.outputs):
        raise BadField("outputs", "outputs has an unknown tensor; the only one is text_output")
    tensors = _tensors(request)
    if "text_input" not in tensors:
        raise BadField("text_input", "text_input is missing; give a BYTES tensor with one text")
    options = _parameters(request.parameters)
    empty_final = bool(options.pop(FINAL, False))
    stream = tensors.get("stream", options.pop("stream", False))
    if not isinstance(stream, bool):
        raise BadField("stream", f"stream={stream!r:.40} must be true or false")
    if (more := tensors.get("sampling_parameters")) is not None:
        options |= _json_object(str(more))
    params = _sampling(options)
    if params.n > limits.outputs:
        raise BadField("n", f"n={params.n} is out of range [1, {limits.outputs}]")
    if stream and params.n != 1:
        raise BadField("n", f"n={params.n} must be 1 with stream=true: replies have no index")
    return Asked(str(tensors["text_input"]), params, stream, empty_final)


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in OPTIONS and name not in (FINAL, "stream"):
            raise BadField(
                name,
                f"parameter {name!r:.60} is not supported; allowed: {', '.join(sorted(OPTIONS))}",
            )
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise BadField(name, f"parameter {name} has no value")
        found[name] = getattr(value, kind)
    return found


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadField("sampling_parameters", "sampling_parameters must be a JSON object")
    if unknown := sorted(set(value) - OPTIONS):
        raise BadField(
            "sampling_parameters",
            f"sampling_parameters has unknown keys {unknown!r:.100}; allowed: {', '.join(sorted(OPTIONS))}",
        )
    return value


def _sampling(options: dict[str, Any]) -> SamplingParams:
    """JSON strings hold what a parameter cannot: numbers as text, lists of stops."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, str) and (name != "stop" or value.startswith("[")):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise BadField(name, f"{name}={value!r:.60} cannot be read as JSON") from None
        values[name] = value
    return SamplingParams(**values)


def _tensors(request: Any) -> dict[str, str | bool]:
    """The one element of each input tensor."""
    raws = list(request.raw_input_contents) if len(request.raw_input_contents) <= 8 else []
    if request.raw_input_contents and len(raws) != len(request.inputs):
        raise BadField(
            "raw_input_contents", "raw_input_contents must have one entry for each input"
        )
    found: dict[str, str | bool] = {}
    if len(request.inputs) > len(TENSORS):
        raise BadField("inputs", f"inputs has {len(request.inputs)} tensors; allowed: {[*TENSORS]}")
    for i, tensor in enumerate(request.inputs):
        kind = TENSORS.get(tensor.name)
        if kind is None or tensor.name in found:
            raise BadField("inputs", f"input {tensor.name!r:.60} is not one of {[*TENSORS]}")
        if tensor.datatype != kind or any(size != 1 for size in tensor.shape):
            raise BadField(
                tensor.name, f"{tensor.name} must be {kind} with one element, such as shape [1]"
            )
        if "shared_memory_region" in tensor.parameters:
            raise BadField(tensor.name, "shared memory is not supported; send the contents")
        data = _raw(tensor.name, kind, raws[i]) if raws else _contents(tensor, kind)
        found[tensor.name] = _decoded(tensor.name, data)
    return found


def _raw(name: str, kind: str, data: bytes) -> bytes | bool:
    if kind == "BOOL" and len(data) == 1:
        return data != b"\0"
    if kind == "BYTES" and len(data) >= 4 and struct.unpack_from("<I", data)[0] == len(data) - 4:
        return data[4:]
    raise BadField(name, f"the raw contents of {name} are not one {kind} element")


def _contents(tensor: Any, kind: str) -> bytes | bool:
    values = tensor.contents.bool_contents if kind == "BOOL" else tensor.contents.bytes_contents
    if len(values) != 1:
        raise BadField(tensor.name, f"{tensor.name} has {len(values)} elements; give one")
    return values[0]


def _decoded(name: str, data: bytes | bool) -> str | bool:
    if isinstance(data, bool):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadField(name, f"{name} is not valid UTF-8") from None


def text_reply(reply: Any, texts: list[str]) -> None:
    """Put `texts` into a ModelInferResponse as the tensor text_output."""
    reply.outputs.add(name="text_output", datatype="BYTES", shape=[len(texts)])
    parts = [text.encode() for text in texts]
    reply.raw_output_contents.append(b"".join(struct.pack("<I", len(p)) + p for p in parts))
