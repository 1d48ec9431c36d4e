"""Who may call what: bearer keys, checked on the route that the router matched, deny by default.

A route is open only if it is named here. Keys are compared as digests, in constant time. Called by
build_app for every route.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from serving.config import ServerConfig
from serving.errors import Unauthenticated

OPEN = frozenset({  # health, and a static page without any data (it asks its reader for a key)
    "/health", "/live", "/livez", "/ping", "/ready", "/readyz", "/v1/health/live", "/v1/health/ready",
    "/status",
})  # fmt: skip


class Keys:
    """A set of keys, kept as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, key: str) -> bool:
        given = _digest(key)
        return any(hmac.compare_digest(given, digest) for digest in self._digests)


class GuardedRoute(BaseRoute):
    """A route that answers only to requests with one of the keys."""

    def __init__(self, route: Route, keys: Keys) -> None:
        self.route = route
        self.path = route.path
        self._keys = keys

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self.route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        check(Headers(scope=scope), self._keys)
        await self.route.handle(scope, receive, send)


def check(headers: Headers, keys: Keys) -> None:
    """Raise Unauthenticated unless the headers hold one of the keys.

    As `Authorization: Bearer KEY`, or as `x-api-key: KEY`, which Anthropic's clients send.
    """
    given = headers.getlist("authorization")
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() == "bearer" and key.strip() in keys:
        return
    named = headers.getlist("x-api-key")
    if not given and len(named) == 1 and named[0] in keys:
        return
    raise Unauthenticated("no valid key; send the header 'Authorization: Bearer KEY'")


def guard(
    routes: Iterable[Route], admin_routes: Iterable[Route], config: ServerConfig
) -> list[BaseRoute]:
    """All routes of the app: admin routes only if there are admin keys, others behind the keys if any."""
    users = Keys((*config.api_keys, *config.admin_api_keys) if config.api_keys else ())
    admins = Keys(config.admin_api_keys)
    guarded: list[BaseRoute] = [
        GuardedRoute(route, users) if users and route.path not in OPEN else route
        for route in routes
    ]
    return guarded + ([GuardedRoute(route, admins) for route in admin_routes] if admins else [])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
