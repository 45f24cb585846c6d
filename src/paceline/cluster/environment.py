"""What a Ray of our own is told by its environment. Ray reads it when it is imported, so this does not import it."""

from __future__ import annotations

import os
import secrets

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
