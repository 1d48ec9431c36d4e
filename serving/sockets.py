"""Binding a listening socket, with an error that names the option. Called by server.py and grpc_server.py."""

from __future__ import annotations

import socket

from jaxinfer.errors import ConfigError


def bind(host: str, option: str, port: int) -> socket.socket:
    """A TCP socket bound to host:port (0: any free one). Raises ConfigError, which names `option`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except BaseException:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"host={host!r} {option}={port} cannot be listened on: {error.strerror or error}; choose "
            f"another --{option.replace('_', '-')} (0: any free one) or --host"
        ) from None
    return found
