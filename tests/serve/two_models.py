"""A server with two tiny models, for the tests."""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from serving import WAIT, until

from paceline.async_llm import AsyncLLM
from paceline.serve.app import several_app
from paceline.serve.options import ServeOptions
from paceline.serve.server import Server, listen
from paceline.serve.several import ModelSpec, Several


class SeveralThread:
    """A server with the models "a" and "b" in threads of this process. Each may be held while it is loaded."""

    def __init__(self, folder: Path, *, limit: int = 1 << 40, idle_s: float = 0.0, max_queue: int = 99,
                 **settings: Any) -> None:
        self.gates = {name: threading.Event() for name in "ab"}
        self.broken: set[str] = set()
        self.loads: list[str] = []
        self.watched: list[weakref.ref[Any]] = []
        self.left: list[bool] = []
        """Whether any of those was there when a model was loaded, each time."""

        def load(name: str) -> AsyncLLM:
            self.loads.append(name)
            self.left.append(any(one() is not None for one in self.watched))
            assert self.gates[name].wait(WAIT)
            if name in self.broken:
                raise OSError("/secret/place is gone")
            length = {"a": 1024, "b": 512}[name]
            return AsyncLLM(str(folder), deterministic=True, max_model_len=length, kv_cache_memory=0.05)

        for gate in self.gates.values():
            gate.set()
        options = ServeOptions(model_name="a", port=0, **settings)
        specs = [ModelSpec(name, partial(load, name), 1000, 1 << 20) for name in "ab"]
        self.several = Several(specs, options, limit, idle_s=idle_s, max_queue=max_queue,
                               loaded={"a": load("a")})
        self._server = Server(several_app(self.several), options)
        self._listening = listen(options)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=asyncio.run, args=(self._server.serve([self._listening]),))
        self._thread.start()
        until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)

    def states(self) -> dict[str, str]:
        return {model["id"]: model["state"] for model in self.http.get("/v1/models").json()["data"]}

    def signal(self) -> None:
        self._server.handle_exit(15, None)

    def wait(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self._server.should_exit = True
        for gate in self.gates.values():
            gate.set()
        self.wait()
        self.several.llm.close()
        self._listening.close()
        self.http.close()
