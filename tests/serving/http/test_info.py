"""What the server tells about itself: phases, models, tokens, load, metrics, settings, OpenAPI."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import Model
from pydantic import ValidationError

import jaxinfer
from serving.config import ServerConfig
from serving.http.openapi import BODIES
from serving.http_server import APIS, build_app
from serving.service import Phase, Service
from tests.serving.http.wire import refusal, strict
from tests.serving.live import LiveServer

READY = ("/health", "/ping", "/ready", "/readyz", "/v1/health/ready")
LIVE = ("/live", "/livez", "/v1/health/live")


def client(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(service)), base_url="http://x")


@pytest.mark.parametrize(
    ("phase", "ready", "live"),
    [
        (Phase.STARTING, 503, 200), (Phase.READY, 200, 200), (Phase.DRAINING, 503, 200),
        (Phase.STOPPED, 503, 503), (Phase.STALLED, 503, 503),
    ],
)  # fmt: skip
async def test_health_follows_the_phase(phase: Phase, ready: int, live: int):
    service = Service(ServerConfig(model="m"))
    service.set_phase(phase)
    async with client(service) as http:
        for path in READY:
            response = await http.get(path)
            assert response.status_code == ready and response.json() == {"status": phase}
            assert (await http.head(path)).status_code == ready
        for path in LIVE:
            assert (await http.get(path)).status_code == live


async def test_while_the_model_loads():
    async with client(Service(ServerConfig(model="m"))) as http:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            response = await http.post(path, json=body)
            assert refusal(response, 503)["type"] == "service_unavailable"
            assert response.headers["retry-after"] == "1"
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert (await http.get("/metrics")).status_code == 501


def test_models(parsing_server: LiveServer):
    with httpx.Client(base_url=parsing_server.url) as http:
        data = strict(http.get("/v1/models").text)
        assert data["object"] == "list"
        assert [Model.model_validate(entry).id for entry in data["data"]] == ["tiny", "org/other"]
        assert {entry["max_model_len"] for entry in data["data"]} == {256}
        assert {entry["cache_unit_tokens"] for entry in data["data"]} == {16}
        for entry in data["data"]:
            assert strict(http.get(f"/v1/models/{entry['id']}").text) == entry
        body = {"prompt": "a", "max_tokens": 1, "model": "org/other"}
        assert http.post("/v1/completions", json=body).json()["model"] == "org/other"


def test_small_answers(http: httpx.Client):
    assert http.get("/version").json() == {"version": jaxinfer.__version__}
    assert http.get("/load").json() == {"server_load": 0}
    (load,) = http.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    assert http.get("/loads").json()["dp_rank_count"] == 1
    metrics = http.get("/metrics")
    assert metrics.status_code == 200 and "vllm:" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")


async def test_settings_hide_keys_and_paths(server: LiveServer):
    config = ServerConfig(
        model="/secret/path",
        served_model_name=("m",),
        api_keys=("secret-key",),
        admin_api_keys=("secret-admin",),
        profile_dir="/secret/profiles",
    )
    service = Service(config, server.engine)
    async with client(service) as http:
        http.headers["authorization"] = "Bearer secret-key"
        for path in ("/server_info", "/v1/models", "/openapi.json", "/v1/loads"):
            response = await http.get(path)
            assert response.status_code == 200 and "secret" not in response.text
        info = (await http.get("/server_info")).json()
    assert info["cache_unit_tokens"] == 16
    assert info["max_model_len"] == 256 and info["engine"]["draining"] is False


def test_tokenizing(http: httpx.Client):
    def ask(**body: Any) -> dict[str, Any]:
        return strict(http.post("/tokenize", json=body).text)

    assert ask(prompt="hello", return_token_strs=True) == {
        "count": 3, "max_model_len": 256, "tokens": [257, 259, 111], "token_strs": ["he", "ll", "o"],
    }  # fmt: skip
    assert ask(prompt="")["tokens"] == []
    assert ask(prompt="x" * 5000)["count"] == 5000  # more than the model takes
    text = "hé 😀 <s> <|im_end|>"
    ids = ask(prompt=text, add_special_tokens=False)["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", json=body).json()
    assert ask(messages=messages)["tokens"] == chat["prompt_token_ids"]
    closed = ask(messages=messages, add_generation_prompt=False)["tokens"]
    assert chat["prompt_token_ids"][: len(closed)] == closed


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [288]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0] * (2**18 + 1)}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x" * 70_000}, "prompt"),
        ("/tokenize", {"messages": 5}, "messages"),
        ("/tokenize", [], "body"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 0}},
         "sampling_params.n"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"bad_words": ["a"]}},
         "bad_words"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "stream_options": {}},
         "stream_options"),
        ("/inference/v1/generate",
         {"token_ids": [1], "sampling_params": {"stop": "a", "detokenize": False}}, "stop"),
    ],
    ids=lambda value: f"{value!r:.40}",
)  # fmt: skip
def test_token_routes_refuse(path: str, body: Any, param: str, http: httpx.Client):
    assert refusal(http.post(path, json=body))["param"] == param


def test_tokenizer_info_has_what_evaluators_need(http: httpx.Client):
    info = strict(http.get("/tokenizer_info").text)
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("</s>", "<s>", None)
    assert "<|im_start|>" in info["chat_template"] and info["model_max_length"] == 256
    tokens = http.post("/tokenize", json={"prompt": "</s>", "add_special_tokens": False}).json()
    assert tokens["count"] == 1


def test_openapi_tells_of_every_route_and_body(http: httpx.Client):
    document = strict(http.get("/openapi.json").text)
    routes = {route.path.replace(":path}", "}") for api in APIS for route in api.ROUTES}
    assert set(document["paths"]) == routes | {"/openapi.json"}
    schemas = document["components"]["schemas"]
    for path in BODIES:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]
    references = {
        part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]
    }
    assert references <= set(schemas)
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert schemas["CompletionRequest"]["properties"]["n"]["anyOf"][0]["maximum"] == 128
    message = schemas["Messages"]["items"]
    assert message["required"] == ["role", "content"]


def test_request_models_are_strict():
    from serving.http.schemas import CompletionRequest

    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "a", "n": "1"})
