"""A server that a benchmark starts for itself, and what any server's `/metrics` says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from paceline.errors import PacelineError


@contextmanager
def server(model: str | None, speculation: str, options: Sequence[str] = (),
           environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    """`paceline serve` in a process of its own, on a free port, with further words on its command line and in its
    environment."""
    command = [sys.executable, "-m", "paceline", "serve", *([model] if model else []), "--port", "0", "--model-name",
               "bench", "--speculation", speculation, *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, env=os.environ | dict(environment or {}))
    try:
        assert process.stdout is not None
        found = re.search(r"http://([^:/]+):(\d+)", process.stdout.readline())
        if found is None:
            raise PacelineError("The server did not start: try `paceline serve` by itself.")
        yield found[1], int(found[2]), process
    finally:
        process.terminate()
        process.wait()


def scrape(url: str, key: str | None = None, timeout_s: float = 60.0) -> dict[str, float]:
    """A server's metrics, without the model's label. `key`: an operator's, where the server wants one."""
    asked = urllib.request.Request(f"{url}/metrics", headers={"authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "")] = float(value)
    return found
