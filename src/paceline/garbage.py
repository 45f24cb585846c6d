"""What Python's collector looks at while an engine serves.

Its full collections walk every object of the process: with torch imported a tenth of a second, in which everybody
waits. What was there before an engine began to serve is left out meanwhile. What has come since grows too, with every
block of text that the cache keeps: full collections are rare then.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PYTHONS_OWN = 1000
"""Objects that Python 3.12 has left out by itself when it starts, at most."""
RARELY = 500
"""Collections of younger objects between two full ones, at least; 10 by default. What they would find by then is a few
objects a request, those that refer to each other."""


class Serving:
    """How many serve in this process: the collector is everybody's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.frozen = False
        """By us: where somebody else has said what is left out, it stays at that."""
        self.threshold: tuple[int, int, int] | None = None
        """The collector's before the first of them; None: nobody serves."""


_SERVING = Serving()


@contextmanager
def only_new_objects_are_collected(serving: Serving = _SERVING) -> Iterator[None]:
    """For long: what is there now is collected once more before, and found again when this is over."""
    with serving.lock:
        serving.count += 1
    try:
        _begin(serving)
        yield
    finally:
        with serving.lock:
            serving.count -= 1
            if not serving.count and serving.threshold is not None:
                gc.set_threshold(*serving.threshold)
                serving.threshold = None
                if serving.frozen:
                    gc.unfreeze()
                    serving.frozen = False


def collect_everything(serving: Serving = _SERVING) -> None:
    """What was left out too: for who has given up something large, an engine say. Everybody waits meanwhile."""
    with serving.lock:
        if serving.frozen:
            gc.unfreeze()
        gc.collect()
        if serving.frozen:
            gc.freeze()


def _begin(serving: Serving) -> None:
    with serving.lock:
        if serving.threshold is not None:
            return
        serving.threshold = young, middle, old = gc.get_threshold()
        gc.set_threshold(young, middle, max(old, RARELY))
        if gc.get_freeze_count() <= PYTHONS_OWN:
            gc.collect()
            serving.frozen = True
            gc.freeze()
