"""Servers for the tests: in threads of this process, and a process of its own for what only a process shows."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

# anyio is a plugin of pytest's, so pytest rewrites its files, also this one, which is read with the first file that is
# served: then in a server's thread. Python 3.11 counts the recursion of all threads' syntax trees as one, and fails.
from anyio import open_file  # noqa: F401
from model_files import write_folder
from rich.console import Console
from small_tokenizers import byte_level

from engine.tiny import BASE, RandomWeights
from paceline.async_llm import AsyncLLM
from paceline.cli import serve as command
from paceline.cli.main import main
from paceline.engine.core import Engine
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from paceline.serve import logs
from paceline.serve import server as serve_server
from paceline.serve.logs import JsonLines, TextLines
from paceline.serve.options import ServeOptions
from paceline.serve.server import Server, create_app, listen

NAME = "tiny"
CONTEXT = 4096
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
WAIT = 60.0
"""Generous: the machine may be busy."""


class Recorder(RandomWeights):
    """Notes what the model asks for, so that the same tensors can be written to a file."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, Any] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        self.taken[name] = super().take(name, shape, dtype)
        return self.taken[name]


def write_model(folder: Path) -> Path:
    """A tiny random model with a tokenizer and a chat template, as a folder a server can be started on."""
    tokenizer = byte_level("smollm")
    config = BASE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": CONTEXT,
                     "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    recorder = Recorder()
    build(ModelConfig.from_dict(config), recorder, CONTEXT)
    write_folder(folder, config, [{name: tensor.contiguous() for name, tensor in recorder.taken.items()}])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}))
    return folder


class ServerProcess:
    """`paceline serve` on a free port, and its log."""

    def __init__(self, model: Path | str, log: Path, *arguments: str, name: str = NAME,
                 env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "serve", str(model), "--port", "0", "--model-name", name,
                 *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[^/]+", line)
        assert found, f"the server did not start: {line!r} {self.log()}"
        self.url = found[0]

    def log(self) -> str:
        return self._log.read_text()

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.url)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        self.signal()
        try:
            return self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


class ServerThread:
    """The same server, as the command makes it, in threads of this process: for all that needs neither a signal nor a
    command line."""

    def __init__(self, model: Path | str, *, name: str = NAME, settings: dict[str, Any] | None = None,
                 **options: Any) -> None:
        """`settings`: the server's; `options`: the engine's."""
        own = ServeOptions(model_name=name, port=0, **settings or {})
        self._llm = AsyncLLM(str(model), **{"speculation": "auto", "max_queue": 256} | options)
        self._server = Server(create_app(self._llm, own), own)
        self._listening = listen(own)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=asyncio.run, args=(self._server.serve([self._listening]),))
        self._thread.start()
        self._lines = io.StringIO()
        self._handler = logging.StreamHandler(self._lines)
        self._handler.setFormatter(TextLines())
        threads = {self._thread.ident, self._llm._thread.ident}
        self._handler.addFilter(lambda record: record.thread in threads)
        logging.getLogger().addHandler(self._handler)
        until(lambda: self._server.started)

    @property
    def engine(self) -> Engine:
        return self._llm.engine

    def log(self) -> str:
        """Warnings and worse, of this server alone."""
        return self._lines.getvalue()

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.url)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """What a process does when it gets the signal."""
        self._server.handle_exit(number, None)

    def wait(self) -> None:
        """Until it has left by itself."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "it is still there"

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self.wait()
        self._llm.close()
        self._listening.close()
        logging.getLogger().removeHandler(self._handler)


class ServerCommand:
    """`paceline serve` with a command line of its own, in a thread of this process. Its log is as --log-format says."""

    def __init__(self, patch: pytest.MonkeyPatch, model: Path | str | None, *arguments: str) -> None:
        """None: the arguments, or a file, name the model."""
        self._lines, said = io.StringIO(), io.StringIO()
        self._handler = logging.StreamHandler(self._lines)
        self._level = logging.getLogger().level
        self._servers: list[Server] = []
        self._codes: list[int] = []
        patch.setattr(logs, "configure", self._configure)
        patch.setattr(serve_server, "Server", self._build)
        patch.setattr(command, "console", lambda: Console(file=said, width=200))
        named = [] if model is None else [str(model), "--model-name", NAME]
        words = ["serve", *named, "--port", "0", *arguments]
        self._thread = threading.Thread(target=lambda: self._codes.append(main(words)))
        self._thread.start()
        found = until(lambda: re.search(r"(http://[^/]+)/v1\s", said.getvalue()) or not self._thread.is_alive())
        assert isinstance(found, re.Match), f"the server did not start: {self._codes}"
        self.url = found[1]

    def _configure(self, form: str) -> None:
        """As `logs.configure`, but what this server's threads say is kept and other handlers stay."""
        self._handler.setFormatter({"json": JsonLines, "text": TextLines}[form]())
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        self._handler.addFilter(lambda record: record.thread not in others)
        logging.getLogger().addHandler(self._handler)
        logging.getLogger().setLevel(logging.INFO)

    def _build(self, *parts: Any) -> Server:
        self._servers.append(Server(*parts))
        return self._servers[-1]

    def log(self) -> str:
        return self._lines.getvalue()

    def signal(self, number: int = signal.SIGTERM) -> None:
        """What a process does when it gets the signal."""
        self._servers[0].handle_exit(number, None)

    def __enter__(self) -> ServerCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers[0].should_exit = True
        self.wait()

    def wait(self) -> int:
        """Until it has left; its exit status."""
        self._thread.join(WAIT)
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger().setLevel(self._level)
        assert not self._thread.is_alive(), "it is still there"
        return self._codes[0]


def slowed(engine: Engine, seconds: float = 0.02) -> None:
    """So slow that nothing is over before a client, or the server, has left."""
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow  # type: ignore[method-assign]


def held(engine: Engine, steps: int) -> threading.Event:
    """The engine takes so many steps, and the next when the event is set."""
    step, go, taken = engine.step, threading.Event(), 0

    def waiting() -> Any:
        nonlocal taken
        taken += 1
        if taken > steps:
            assert go.wait(WAIT)
        return step()

    engine.step = waiting  # type: ignore[method-assign]
    return go


def metrics_of(url: str) -> dict[str, float]:
    return parse_metrics(httpx.get(f"{url}/metrics", timeout=WAIT).text)


@contextmanager
def served(engine: Engine, **options: Any) -> Iterator[str]:
    """The app on a real socket, in a thread of this process; its URL."""
    settings = ServeOptions(model_name=NAME, port=0, **options)
    llm = AsyncLLM(engine=engine)
    server = Server(create_app(llm, settings), settings)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),))
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT)
            llm.close()


def parse_metrics(text: str) -> dict[str, float]:
    """"name{labels without the model's}" -> value."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        name = re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "")
        found[name] = float(value)
    return found


def until(condition: Callable[[], Any], wait: float = WAIT) -> Any:
    end = time.monotonic() + wait
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return found


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, up to [DONE]."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
