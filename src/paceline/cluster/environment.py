"""What a Ray of our own is told by its environment. Ray reads it when it is imported, so this does not import it."""

from __future__ import annotations

import os
import secrets


def set_for_own_ray() -> None:
    """It is reached from this machine alone, and then needs a token that this process hands to those it starts; and
    nothing is sent home."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Asked for 127.0.0.1, Ray takes the machine's own address and listens everywhere, unless it is told that it is a
    # cluster of one machine: it has no other name for that.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.pop("RAY_ADDRESS", None)
