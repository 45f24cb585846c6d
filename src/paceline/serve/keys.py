"""Keys: who calls, whose requests these are, and how much of the engine they may see."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.request import Tenant
from paceline.serve.errors import ApiError
from paceline.serve.options import ServeOptions
from paceline.serve.quotas import UNLIMITED, Quota

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/api/version", "/docs"})
OPEN_PREFIX = "/page/"
"""What needs no key: probes, and the page's files, which hold nothing of anybody's."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent an HTTP request."""

    tenant: Tenant
    operator: bool
    """May see what the engine does for all."""
    quota: Quota = UNLIMITED

    def sees(self, tenant: Tenant) -> bool:
        """Whether requests of this tenant may be shown to the caller."""
        return self.operator or tenant.name == self.tenant.name


class ApiKeys:
    """Asks for one of the keys, if there are any, as a bearer token or as x-api-key, and notes who calls. Comparing
    takes the same time wherever a wrong key differs."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._open = not options.keys
        self._anybody = Caller(Tenant(shares_cache=True), self._open, options.quota)
        """Without keys nobody can be told apart from anybody else."""
        alone = len(set(options.keys)) == 1
        secret = secrets.token_bytes(32)
        self._callers: list[tuple[bytes, Caller]] = []
        """By digests of the keys: of equal length, so that not even the length of a key shows."""
        for key in dict.fromkeys(options.keys):
            # Made with a secret of this process: wherever a name may get to, no key can be guessed by it.
            name = hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()
            caller = Caller(Tenant(name, options.share_cache), alone or key in options.operator_keys,
                            options.key_quotas.get(key, options.quota))
            self._callers.append((_digest(key), caller))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._caller(scope)
            if caller is None:
                refusal = ApiError(401, "A valid API key is needed: send it as 'Authorization: Bearer KEY' or as "
                                   "'x-api-key: KEY'.", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
                await refusal.response()(scope, receive, send)
                return
            scope["state"]["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if self._open or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_PREFIX):
            return self._anybody
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        digest = _digest(given.strip())
        found = [caller for key, caller in self._callers if hmac.compare_digest(digest, key)]
        return found[0] if found else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def check_operator(request: Request) -> None:
    """Refuse whoever may not see what the engine does for all."""
    if not caller_of(request).operator:
        raise ApiError(403, "This tells of everybody's requests and needs an operator's key: start the server with "
                       "--operator-key KEY, and send that one.", code="operator_key_needed")
