"""The HTTP port as a Starlette app: all routes behind one service, and uvicorn's settings.

Each API is a module with ROUTES; this puts them together, guards them and maps errors. Never
touches the engine. Called by server.py and tests.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette

from serving.config import ServerConfig
from serving.http import completions, info
from serving.http.auth import guard
from serving.http.errors import HANDLERS
from serving.service import Service

KEEP_ALIVE = 5  # seconds


def build_app(service: Service) -> Starlette:
    """The app for a service; `app.state.service` is the service."""
    routes = [*completions.ROUTES, *info.ROUTES]
    app = Starlette(routes=guard(routes, [], service.config), exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # one path is one route
    app.state.service = service
    return app


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Settings of uvicorn.Config that bound what a connection may cost."""
    return {
        "limit_concurrency": config.limits.connections,
        "timeout_keep_alive": KEEP_ALIVE,
        "lifespan": "off",
        "ws": "none",
        "server_header": False,
        "proxy_headers": False,
        "access_log": False,
    }
