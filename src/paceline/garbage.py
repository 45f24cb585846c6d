"""What Python's collector looks at while requests are served.

Its full collections walk every object of the process: with torch imported a tenth of a second, in which everybody
waits. What was there before is not garbage, so it can be left out meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_objects_are_collected() -> Iterator[None]:
    """Takes no time itself. What is there now, and becomes garbage in a cycle, is found when this is over."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
