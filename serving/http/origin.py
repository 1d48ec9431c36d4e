"""Keeps pages of other sites away from a server that trusts everyone on this machine.

A page can make its own name resolve to 127.0.0.1 and then talks to a loopback server as to its own site;
only the Origin that browsers add tells. Programs send none. Put before all routes by http_server.py.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.errors import Forbidden
from serving.http.errors import error_response


class LocalOrigins:
    """Answers 403 to requests whose Origin is not of this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is not None and not _is_local(origin):
            error = Forbidden(
                f"origin={origin!r:.100} is a site elsewhere; set --api-key to serve it"
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
