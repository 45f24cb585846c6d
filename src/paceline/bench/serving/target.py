"""The server under test: any that speaks OpenAI's API at a URL. What it is called, what it serves, what it counts."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any, ClassVar
from urllib.parse import urlsplit

from paceline.bench.serving.own_server import scrape
from paceline.errors import ConfigError, PacelineError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ASK_S = 30.0
"""Seconds to wait for what is no completion."""
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts", "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "looked_up": "vllm:prefix_cache_queries", "found": "vllm:prefix_cache_hits",
}
"""Of /metrics, in the names that vLLM gave them and Paceline has too."""


@dataclass(frozen=True)
class Target:
    """`base`: the URL without /v1 and without a slash at its end."""

    kind: ClassVar[str] = "server"
    base: str
    api_key: str | None = None
    model: str = ""
    option: str = "--url"
    """Which gave its address."""

    @staticmethod
    def parse(url: str, api_key: str | None = None, option: str = "--url") -> Target:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"{option} {url!r} is no address of a server: write it as http://127.0.0.1:8000.")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Target(f"{parts.scheme}://{parts.netloc}{path}", api_key, option=option)

    def address(self, endpoint: str) -> dict[str, Any]:
        """What the load generator needs to know of it."""
        parts = urlsplit(self.base)
        tls = parts.scheme == "https"
        return {"host": parts.hostname, "port": parts.port or (443 if tls else 80), "tls": tls,
                "authority": parts.netloc.rpartition("@")[2], "headers": self.headers, "path": parts.path + endpoint}

    @property
    def place(self) -> tuple[str, int, str]:
        """The same for two ways to write the address of one server."""
        found = self.address("")
        return LOOPBACK[0] if found["host"] in LOOPBACK else found["host"], found["port"], found["path"]

    def drive(self, endpoint: str, plan: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Have the load generator do it, in a process of its own; what it saw."""
        process = subprocess.Popen([sys.executable, "-m", "paceline.bench.serving.client"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with process:
            try:
                process.stdin.write(json.dumps(self.address(endpoint) | plan))
                process.stdin.close()
                for line in process.stdout:
                    said = json.loads(line)
                    if "result" in said:
                        found: dict[str, Any] = said["result"]
                        return found
                    progress(said)
                problem = process.stderr.read().strip().splitlines()
                raise PacelineError(f"The load generator failed: {problem[-1] if problem else 'it said nothing'}")
            finally:
                process.kill()

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def served(self, wanted: str | None) -> Target:
        """With the model's name: the one that is wanted, or the first that the server has. Whether there is a server,
        and whether it takes the key, is known then too."""
        try:
            asked = urllib.request.Request(f"{self.base}/v1/models", headers=self.headers)
            with urllib.request.urlopen(asked, timeout=ASK_S) as answer:
                found = json.loads(answer.read())["data"][0]["id"]
        except urllib.error.HTTPError as error:
            refuse_key(error.code, self.base)
            found = None
        except (OSError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)).strip() or type(error).__name__
            raise PacelineError(f"No server answers at {self.base} ({reason}): start it, or correct "
                                f"{self.option}.") from None
        except (ValueError, KeyError, IndexError, TypeError):
            found = None
        if wanted is None and found is None:
            raise ConfigError(f"{self.base}/v1/models names no model: say which to ask for with --model.")
        return replace(self, model=wanted or str(found))

    def counters(self) -> dict[str, float] | None:
        """What it has counted so far, over all its labels; None where it does not tell."""
        try:
            lines = scrape(self.base, self.api_key, ASK_S)
        except (OSError, HTTPException, ValueError):
            return None
        totals: dict[str, float] = {}
        for name, value in lines.items():
            bare = name.split("{")[0].removesuffix("_total")
            totals[bare] = totals.get(bare, 0.0) + value
        return {short: totals[name] for short, name in COUNTERS.items() if name in totals}


def refuse_key(status: int, base: str) -> None:
    if status in (401, 403):
        raise ConfigError(f"{base} refuses the key (HTTP {status}): give the right one with --api-key, or in "
                          "OPENAI_API_KEY.")
