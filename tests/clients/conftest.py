"""Client libraries against a server in a process of its own: `make clients`. They need environments of their own, which
have no Paceline, so nothing here imports it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when it is imported: it would fetch prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")



@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Its address."""
    python = os.environ.get("PACELINE_PYTHON")
    if python is None:
        pytest.skip("client libraries are tested by `make clients`")
    command = [python, str(Path(__file__).with_name("server.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    url = process.stdout.readline().strip()
    assert url, "the server did not start"
    yield url
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that libraries insist on, and nothing that they would report elsewhere."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "unused")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
