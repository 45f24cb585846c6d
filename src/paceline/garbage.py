"""What Python's collector looks at while an engine serves.

Its full collections walk every object of the process: with torch imported a tenth of a second, in which everybody
waits. What was there before an engine began to serve is left out meanwhile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Serving:
    """How many serve in this process: the collector is everybody's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.frozen = False
        """By us: where somebody else has said what is left out, it stays at that."""


_SERVING = Serving()


@contextmanager
def only_new_objects_are_collected(serving: Serving = _SERVING) -> Iterator[None]:
    """For long: what is there now is collected once more before, and found again when this is over."""
    with serving.lock:
        serving.count += 1
        if serving.count == 1 and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            serving.frozen = True
    try:
        yield
    finally:
        with serving.lock:
            serving.count -= 1
            if not serving.count and serving.frozen:
                gc.unfreeze()
                serving.frozen = False
