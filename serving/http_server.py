"""The HTTP port as a Starlette app: all routes behind one service, and uvicorn's settings.

Each API is a module with ROUTES; this puts them together, guards them and maps errors. Never
touches the engine. Called by server.py and tests.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware

from serving.http import (
    admin,
    chat,
    completions,
    generate,
    info,
    messages,
    responses,
    status,
    tokens,
)
from serving.http.auth import guard
from serving.http.errors import HANDLERS, on_http_error
from serving.http.openapi import openapi_route
from serving.http.origin import LocalOrigins
from serving.http.protocol import BoundedHttp
from serving.service import Service

UVICORN_OPTIONS: dict[str, Any] = {  # bounds on what a connection costs; server.py has the rest
    "http": BoundedHttp,
    "timeout_keep_alive": 5,
    "ws": "none",
    "server_header": False,
    "proxy_headers": False,
}
APIS = (completions, chat, responses, messages, tokens, generate, info, status)


def build_app(service: Service) -> Starlette:
    """The app for a service; `app.state.service` is the service."""
    routes = [route for api in APIS for route in api.ROUTES]
    routes.append(openapi_route(routes))
    # Starlette would raise again what a handler of Exception has answered; its middleware does not.
    handlers = Middleware(ExceptionMiddleware, handlers=HANDLERS)
    config = service.config
    trusting = config.loopback and not config.api_keys
    app = Starlette(
        routes=guard(routes, admin.ROUTES, config),
        middleware=[Middleware(LocalOrigins), handlers] if trusting else [handlers],
        exception_handlers={HTTPException: on_http_error},  # else Starlette answers in plain text
    )
    app.router.redirect_slashes = False  # one path is one route
    app.state.service = service
    return app
