"""ClusterViews: what operators and the page see of several engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from paceline.engine.observe.timeline import Timelines
from paceline.serve.keys import Caller
from paceline.serve.metrics import Report
from paceline.serve.snapshot import EngineState
from paceline.serve.together import newest, together
from paceline.serve.views import TraceFound

ANSWER_S = 5.0
"""A replica that has not answered after so long is left out."""
GONE = (RayError, RayServeException, TimeoutError)
"""Of a deployment that has no replica at the moment."""


@dataclass(frozen=True)
class ClusterViews:
    handles: Sequence[DeploymentHandle[Any]]
    """Of all deployments."""
    timelines: Timelines = field(default_factory=Timelines)
    """Empty: replicas keep their own."""
    clock: Callable[[], float] = time.monotonic
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "paceline-views"))
    """Who looks waits in these: nobody's request does, should a replica not answer."""

    async def _ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        """Every replica's answer, by name; those that are just gone are left out."""
        def wait() -> list[Any]:
            """Not results_async(): there one that does not answer takes the answers of all others along."""
            asked, answers = [], []
            for handle in self.handles:
                with suppress(*GONE):
                    asked.append(handle.broadcast("view", what, *arguments))
            for one in asked:
                with suppress(*GONE):
                    answers += one.results(timeout_s=ANSWER_S, return_exceptions=True)
            return answers

        answers = await asyncio.get_running_loop().run_in_executor(self.threads, wait)
        return dict(sorted(answer for answer in answers if not isinstance(answer, BaseException)))

    async def reports(self) -> Mapping[str, Report]:
        return await self._ask("report")

    async def state(self) -> EngineState:
        return together(await self._ask("state"), self.clock())

    async def requests(self, viewer: Caller) -> list[dict[str, Any]]:
        """One that moved shows on every replica that had a part in it, with its own part."""
        return newest((await self._ask("requests", viewer)).values())

    async def story(self, request_id: str, viewer: Caller) -> dict[str, Any] | None:
        answers = await self._ask("story", request_id, viewer)
        return next((told for told in answers.values() if told is not None), None)

    async def trace(self, request_id: str, viewer: Caller) -> TraceFound | None:
        found = [one for one in (await self._ask("trace", request_id, viewer)).values() if one is not None]
        return next((one for one in found if one.text is not None), found[0] if found else None)
