"""Taking the port: before anything slow happens, so that a taken one is noticed at once."""

from __future__ import annotations

import errno
import socket

from jaxserve.core.errors import JaxserveError


class ListenError(JaxserveError):
    """The address cannot be listened on; the message says why and what to do."""


def listen(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening socket. Connections queue in it until somebody accepts them.

    Raises:
        ListenError: the port is taken or not allowed, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ListenError(f"--host {host!r} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        # a restart need not wait for old connections; a port that somebody listens on is refused all the same
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken; stop the other server or choose another --port"
            raise ListenError(message) from None
        if error.errno == errno.EACCES:
            message = f"port {port} needs more rights than this user has; choose a --port above 1023"
            raise ListenError(message) from None
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}; check --host and --port") from None
    listener.setblocking(False)
    return listener


def base_url(listener: socket.socket) -> str:
    """How a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
