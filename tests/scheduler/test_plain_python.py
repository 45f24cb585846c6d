"""The scheduler and the cache's bookkeeping need no torch."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("engine.schedule.sequence", "engine.schedule.step", "engine.schedule.queue", "engine.schedule.limits",
           "engine.schedule.preemption", "engine.schedule.step_builder", "engine.schedule.scheduler", "cache.manager",
           "cache.swap", "cache.offload")


def test_they_are_imported_where_there_is_none() -> None:
    script = "import sys; sys.modules['torch'] = None; " + "; ".join(f"import paceline.{name}" for name in MODULES)
    subprocess.run([sys.executable, "-c", script], check=True)
