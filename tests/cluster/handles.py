"""Replicas in this process, behind a handle that does what Serve's does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from paceline.cluster.features import candidate
from paceline.cluster.replica import Replica
from paceline.cluster.routing import PrefixAware


class Results:
    def __init__(self, answers: Callable[[], list[Any]]) -> None:
        self._answers = answers

    def results(self, timeout_s: float | None = None, **_: Any) -> list[Any]:
        """As Serve's: one that fails, or takes too long, is an exception among the answers of the others."""
        async def all_of_them() -> list[Any]:
            answers = (asyncio.wait_for(one, timeout_s) for one in self._answers())
            return await asyncio.gather(*answers, return_exceptions=True)

        return asyncio.run(all_of_them())


class Response:
    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class Handle:
    """What the front uses of Serve's."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = {one.name: one for one in replicas}
        self.policy = PrefixAware()
        self.sent: list[str] = []
        self.ended: dict[str, asyncio.Event] = {}

    def broadcast(self, what: str, *arguments: Any) -> Results:
        return Results(lambda: [getattr(one, what)(*arguments) for one in self.replicas.values()])

    @property
    def carry_out(self) -> Handle:
        self.what = "carry_out"
        return self

    @property
    def prefill(self) -> Handle:
        self.what = "prefill"
        return self

    def remote(self, features: Any, *rest: Any) -> Response:
        what = self.what

        async def call() -> Any:
            name = self.policy.choose(features, [candidate(name, {}) for name in self.replicas])
            assert name is not None
            self.sent.append(name)
            features.progress.replica = name
            self.policy.begun(features, name)
            try:
                return await getattr(self.replicas[name], what)(features, *rest)
            finally:
                self.policy.ended(features, name)

        return Response(asyncio.ensure_future(call()))
