"""Who may call what: every route and method, odd paths, odd headers (the matched route decides).

Deny by default: what is not health needs a key once keys are set, and admin routes do not exist
without admin keys.
"""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from serving.config import ServerConfig
from serving.http import admin
from serving.http.auth import OPEN, GuardedRoute, guard
from serving.http_server import APIS, build_app
from serving.service import Service

HEALTH = {"/health", "/ping", "/live", "/livez", "/ready", "/readyz"}
ROUTES: list[Route] = [route for api in APIS for route in api.ROUTES]
ADMIN = [route.path for route in admin.ROUTES]
KEYED = ServerConfig(model="m", api_keys=("user-key", "second"), admin_api_keys=("admin-key",))


async def ask(
    app: Starlette, path: str, method: str = "GET", headers: list[tuple[str, str]] | None = None,
    root_path: str = "", raw: bytes | None = None,
) -> tuple[int, dict[str, str]]:  # fmt: skip
    """One request as raw ASGI, so that no client tidies the path. Returns status and headers."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": path, "raw_path": path.encode() if raw is None else raw,
        "root_path": root_path, "query_string": b"", "client": ("127.0.0.1", 1), "app": app,
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in headers or []],
        "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    told = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], told


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


@pytest.fixture(scope="module")
def keyed() -> Starlette:
    return build_app(Service(KEYED))  # no engine: what is let in gets 4xx or 503, never 401


def concrete(path: str) -> str:
    return path.replace("{model:path}", "m").replace("{response_id}", "r")


@pytest.mark.parametrize("path", sorted({r.path for r in ROUTES} | {"/openapi.json"}))
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
async def test_every_route_needs_a_key_but_health(path: str, method: str, keyed: Starlette):
    status, headers = await ask(keyed, concrete(path), method)
    if path in OPEN:
        assert status != 401
    else:
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        for key in ("user-key", "second", "admin-key"):
            assert (await ask(keyed, concrete(path), method, bearer(key)))[0] != 401


def test_what_is_open():
    health = {p for p in OPEN if p.startswith("/v1/health/") or p in HEALTH}
    assert OPEN - health == {"/status"}  # a static page without data
    guarded = {r.path for r in guard(ROUTES, [], KEYED) if isinstance(r, GuardedRoute)}
    assert guarded == {r.path for r in ROUTES} - OPEN


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""), bearer("user-key2"), bearer("USER-KEY"), bearer("user-ke"), bearer("user-key\xe9"),
        [("authorization", "user-key")], [("authorization", "Basic user-key")],
        [("authorization", "Bearer")], [("authorization", "Beareruser-key")],
        [("authorization", "Bearer user-key,other")], [*bearer("user-key"), *bearer("other")],
        [("x-api-key", "other")], [("x-api-key", "user-key"), ("x-api-key", "user-key")],
        [*bearer("wrong"), ("x-api-key", "user-key")],
        [("cookie", "authorization=Bearer user-key")], [("api-key", "user-key")],
    ],
)  # fmt: skip
async def test_wrong_credentials(headers: list[tuple[str, str]], keyed: Starlette):
    assert (await ask(keyed, "/v1/models", headers=headers))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        bearer("user-key"), bearer(" user-key "), [("Authorization", "bearer second")],
        [("x-api-key", "second")],
    ],
)  # fmt: skip
async def test_right_credentials(headers: list[tuple[str, str]], keyed: Starlette):
    assert (await ask(keyed, "/v1/models", headers=headers))[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1//models", "/v1/models/", "/v1/models/x", "/V1/models", "/v1/models;x",
        "/v1/models?x", "/v1/models%2f", "/v1%2fmodels", "/./v1/models", "/health/../v1/models",
        "/health/v1/models", "/health;/v1/models", "/health\n/v1/models", "/v1/models\n",
        "/v1/health/../models", "/ping/../metrics", "/metrics/", "//metrics", "/metrics\x00", "",
        "/", "*", "v1/models", "http://x/v1/models", "/openapi.json/", "/status/", "/status.json",
    ],
)  # fmt: skip
async def test_odd_paths_reveal_nothing(path: str, keyed: Starlette):
    assert (await ask(keyed, path))[0] in (401, 404)


@pytest.mark.parametrize("raw", [b"/health", b"/v1/models", b"/", b"//health/../v1/models"])
@pytest.mark.parametrize("root", ["", "/health", "/v1", "/v1/models"])
async def test_only_the_path_that_the_router_takes_counts(raw: bytes, root: str, keyed: Starlette):
    """What a server says besides (raw_path, root_path) opens nothing."""
    assert (await ask(keyed, "/v1/models", raw=raw, root_path=root))[0] in (401, 404)
    assert (await ask(keyed, root + "/v1/models", raw=raw, root_path=root))[0] in (401, 404)


async def test_admin_routes(keyed: Starlette):
    plain = build_app(Service(ServerConfig(model="m")))
    users = build_app(Service(ServerConfig(model="m", api_keys=("user-key",))))
    admins = build_app(Service(ServerConfig(model="m", admin_api_keys=("admin-key",))))
    for path in ADMIN:
        for app in (plain, users):
            assert (await ask(app, path, "POST", bearer("user-key")))[0] == 404
        for app in (keyed, admins):
            assert (await ask(app, path, "POST"))[0] == 401
            assert (await ask(app, path, "POST", bearer("user-key")))[0] == 401
            assert (await ask(app, path, "POST", bearer("admin-key")))[0] in (400, 200, 503)
    assert (await ask(admins, "/v1/models"))[0] == 200  # no user keys: the rest is open
    assert (await ask(plain, "/v1/models"))[0] == 200
