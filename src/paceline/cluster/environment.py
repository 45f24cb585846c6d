"""What a Ray of our own is told by its environment. Ray reads it when it is imported, so this does not import it."""

from __future__ import annotations

import os
import secrets


def set_for_own_ray() -> None:
    """Whoever reaches its ports needs a token that this process alone hands to those it starts; and nothing is sent
    home."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.pop("RAY_ADDRESS", None)
