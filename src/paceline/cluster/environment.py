"""Which Ray it has to be, and what one of our own is told by its environment. Ray reads that when it is imported, so
this does not import it."""

from __future__ import annotations

import os
import re
import secrets

from paceline.errors import ConfigError

OLDEST_RAY = (2, 60)
"""The one that this was tested with. Older ones lack a part of what is used of Serve, or ignore RAY_AUTH_MODE."""
CALM = {
    "RAY_worker_niceness": "0",  # it is 15: whatever else runs would go before the engines
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",  # it is 0.1
    "RAY_task_events_report_interval_ms": "0",  # every call is reported to a dashboard that does not run
    "RAY_enable_metrics_collection": "0",  # ours are collected by the front
}
"""What keeps Ray's own processes quiet: on few cores every moment of theirs stops a thread of an engine, and those that
wait for it. Whoever sets another value in the environment has it."""


def set_for_own_ray() -> None:
    """It is reached from this machine alone, and then needs a token that this process hands to those it starts; and
    nothing is sent home."""
    for name, value in CALM.items():
        os.environ.setdefault(name, value)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Asked for 127.0.0.1, Ray takes the machine's own address and listens everywhere, unless it is told that it is a
    # cluster of one machine: it has no other name for that.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.pop("RAY_ADDRESS", None)


def check_ray(version: str) -> None:
    """An old one would not just fail: its ports might let everybody in."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_RAY:
        wanted = ".".join(map(str, OLDEST_RAY))
        raise ConfigError(f"Replicas need Ray {wanted} or later, and {version} is installed: pip install -U "
                          "'paceline[cluster]'.")
