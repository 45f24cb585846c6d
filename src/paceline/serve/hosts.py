"""Hosts: by which names a server may be called, where a name is all that keeps strangers' pages out.

A server that asks for no key and listens on this machine alone trusts whoever can reach it. A web page can make a
browser reach it: the page's own name is pointed at 127.0.0.1 after it has loaded (DNS rebinding), and the browser takes
the server for the page's. Such requests carry the page's name in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serve.errors import ApiError
from paceline.serve.options import ServeOptions

LOCAL = ("localhost", "127.0.0.1", "::1")
BRACKETED = re.compile(r"\[([^\[\]]*)\](?::[0-9]+)?")


def trusted_hosts(options: ServeOptions) -> tuple[str, ...]:
    """The names a request may use; empty: any."""
    if not options.allowed_hosts and (options.keys or not is_loopback(options.host)):
        return ()
    return (*LOCAL, options.host, *options.allowed_hosts)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there; `host` is a name or an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return ipaddress.ip_address(found[0][4][0]).is_loopback


class Hosts:
    """Refuses requests whose `Host` names another. Those without (HTTP/1.0 probes) pass: browsers send one."""

    def __init__(self, app: ASGIApp, trusted: Iterable[str]) -> None:
        self._app = app
        self._trusted = frozenset(name_of(host) for host in trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).getlist("host")
            if len(given) > 1 or any(name_of(host) not in self._trusted for host in given):
                refusal = ApiError(403, "This server is not called by that name: use localhost, or have it started "
                                   "with --allowed-host NAME.", code="host_not_allowed")
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def name_of(host: str) -> str:
    """A host as it may stand in a header, without its port and brackets, in one spelling."""
    if bracketed := BRACKETED.fullmatch(host):
        host = bracketed[1]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    return host.rstrip(".").lower()
