"""GET /openapi.json: the routes, with the request bodies as the pydantic models describe them.

Made from the app's own routes, so that none is left out. Fuzzers and client generators read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jaxinfer
from serving.http import schemas
from serving.http.auth import OPEN
from serving.http.errors import JsonResponse
from serving.http.messages_request import CountTokensRequest, MessagesRequest
from serving.http.responses_request import ResponsesRequest

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (schemas.CompletionRequest,),
    "/v1/chat/completions": (schemas.ChatRequest,),
    "/v1/chat/completions/render": (schemas.ChatRequest,),
    "/tokenize": (schemas.TokenizePromptRequest, schemas.TokenizeChatRequest),
    "/detokenize": (schemas.DetokenizeRequest,),
    "/inference/v1/generate": (schemas.GenerateRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountTokensRequest,),
}
_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "a field is wrong, or not supported",
    "401": "no key, or a wrong one",
    "404": "no such model or object",
    "413": "the body is too large",
    "429": "too much is waiting",
    "503": "the server is starting or stopping",
}


def document(routes: Iterable[Route], bodies: Mapping[str, tuple[type[BaseModel], ...]]) -> Any:
    """The OpenAPI 3.1 document of `routes`."""
    models = {model for found in bodies.values() for model in found}
    ordered = sorted(models, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=_REF
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(route.path.replace(":path}", "}"), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            found = [references[m, "validation"] for m in bodies.get(route.path, ())]
            operations[method.lower()] = _operation(route, found)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": jaxinfer.__version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, bodies: list[Any]) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    responses: dict[str, Any] = {"200": {"description": "the answer"}}
    for status, text in _STATUSES.items():
        responses[status] = {"description": text, "content": {"application/json": error}}
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or route.name).strip().split("\n")[0],
        "responses": responses,
    }
    names = list(route.param_convertors)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if bodies:
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if route.path not in OPEN:
        operation["security"] = [{"key": []}, {}]
    return operation


def openapi_route(
    routes: list[Route], bodies: Mapping[str, tuple[type[BaseModel], ...]] = BODIES
) -> Route:
    """The route that tells about `routes`."""
    told: list[Any] = []  # made when it is first asked for

    async def openapi(request: Request) -> Response:
        """This document."""
        del request
        if not told:
            told.append(document(routes, bodies))
        return JsonResponse(told[0])

    return Route("/openapi.json", openapi)
