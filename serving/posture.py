"""What a configuration leaves open, in words for whoever starts the server. Changes nothing.

Called by server.py.
"""

from __future__ import annotations

from serving.config import ServerConfig


def posture(config: ServerConfig) -> list[str]:
    """One line for each thing that is open; none for what is closed."""
    lines = []
    who = "everyone on this machine" if config.loopback else "everyone who reaches this address"
    if not config.api_keys:
        lines.append(f"no authentication: {who} may use the model (--api-key closes this)")
    if not config.loopback:
        lines.append(f"host={config.host}: other machines can connect (--host 127.0.0.1)")
    if config.ssl_certfile is None:
        lines.append("no TLS: prompts, answers and keys travel in the clear (--ssl-certfile)")
    lines += _administration(config, who)
    if config.log_requests:
        lines.append("prompts are logged (--no-enable-log-requests)")
    if config.otlp_traces_endpoint:
        lines.append(f"spans are sent to {config.otlp_traces_endpoint}")
    lines += _kv_events(config)
    if config.chat_template is not None:
        lines.append("the chat template is not the model's own; it runs in the sandbox")
    return lines


def _administration(config: ServerConfig, who: str) -> list[str]:
    if config.admin_api_keys:
        return ["admin routes exist: cache reset, abort, profiles (--admin-api-key opened them)"]
    if config.grpc_port is None:
        return []
    if config.api_keys:
        who = "every client with a key"
    return [f"gRPC FlushCache, StartProfile and StopProfile: {who} may call (--admin-api-key)"]


def _kv_events(config: ServerConfig) -> list[str]:
    """The sockets have neither keys nor TLS, whatever the ports have."""
    events = config.kv_events or {}
    if not events.get("enable_kv_cache_events") or events.get("publisher", "zmq") != "zmq":
        return []
    return ["KV events name the token ids of prompts to whoever reaches their endpoint"]
