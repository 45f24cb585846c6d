"""Paceline beyond one process: replicas on Ray, routing, streams that move."""

from __future__ import annotations

from typing import Any

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """`app` needs Ray, and nothing else here does. No module may have its name: importing one sets the attribute."""
    if name == "app":
        from paceline.cluster.application import app

        return app
    raise AttributeError(name)
