"""Other ways to ask for the same: OpenAI's and Anthropic's paths without /v1, and HEAD wherever GET works."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHORT = frozenset({"/chat/completions", "/completions", "/models", "/embeddings", "/responses", "/messages",
                   "/messages/count_tokens"})
SHORT_PREFIXES = ("/models/", "/responses/")


class Spellings:
    """Stands before all that goes by a path or a method, so that keys and quotas know one spelling only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path in SHORT or path.startswith(SHORT_PREFIXES):
            scope = {**scope, "path": f"/v1{path}"}
        if scope["method"] == "HEAD":
            await self._head({**scope, "method": "GET"}, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What GET would begin with. What follows is not waited for: it may be a stream without an end."""
        begun = asyncio.Event()

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                begun.set()

        task = asyncio.ensure_future(self._app(scope, receive, respond))
        waiting = asyncio.ensure_future(begun.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.is_set():
                await task  # it has failed, and says why
        finally:
            task.cancel()
            waiting.cancel()
            await asyncio.gather(task, return_exceptions=True)
