"""A hub of one's own, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hub.stand_in import StandIn, running

GGUF = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """With a few GGUF files, named in HF_ENDPOINT; no waiting between tries."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    files = {"README.md": b"hello", "model-Q4_K_M.gguf": GGUF, "model-Q8_0.gguf": GGUF * 2,
             "mmproj-model-F16.gguf": GGUF, "big-Q6_K-00001-of-00002.gguf": GGUF, "big-Q6_K-00002-of-00002.gguf": GGUF}
    with running(StandIn(files)) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made
