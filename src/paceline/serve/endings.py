"""Why a choice ended, in OpenAI's words and in those of the engine."""

from __future__ import annotations

from typing import Any

CUT = ("length", "timeout", "cancelled", "error")
"""Ends that come before the model's own. Clients know one word for them."""


def ended(reason: str | None, stop_reason: str | int | None, called: str | None = None) -> dict[str, Any]:
    """What a choice says of its end; None: it has none yet. `called`: what an answer ends with that calls tools."""
    told = "length" if reason in CUT else reason and "stop"
    return {"finish_reason": called if called and told == "stop" else told, "stop_reason": stop_reason,
            "paceline": {"finish_reason": reason}}
