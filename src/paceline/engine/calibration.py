"""Calibration: what steps take, measured before the first request, by steps of requests that nobody asked for."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.request import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.core import Engine

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
ROUNDS = ((2, 0.4), (3, 1.0))
"""Steps of each number of rows, besides those in which further ones come in, and until which share of the time. What
else the machine does for a moment then finds a number of rows once, and the best of all its steps holds."""
LIMIT = 1.5
"""Seconds for all of it: where steps take long, the largest are left out, and those of one row are what there is."""
PROMPT, CHUNK = 2, 96
"""Tokens of a request's prompt, and of one more whose rows tell what those of prompts take."""
SALT = "calibration"


def calibrate(engine: Engine, limit: float = LIMIT) -> None:
    """Decode for ever more sequences at once until the time is over, as requests do; engine.cost learns from it as from
    any step. Only where nobody has asked for anything yet: what it leaves in the cache is emptied, what it counted is
    taken back. One that fails says nothing: the first request will."""
    begun = engine.clock()
    engine.cost.calibrating = True
    try:
        for number, (steps, share) in enumerate(ROUNDS):
            _round(engine, f"{SALT}-{number}", steps, begun + share * limit)
    finally:
        engine.cost.calibrating = False
    engine.cost.anchor(ROWS)


def _round(engine: Engine, salt: str, steps: int, until: float) -> None:
    """One time through the numbers of rows; nothing of it is left."""
    counted = deepcopy(engine.metrics)
    asked: list[str] = []
    try:
        _decode(engine, asked, salt, steps, until)
    except PacelineError:
        pass
    finally:
        for request in asked:
            engine.cancel(request)
        while engine.has_work:
            engine.step()
        for request in asked:
            engine.take(request)
        engine.cache.forget()
        for name in counted.__slots__:
            setattr(engine.metrics, name, getattr(counted, name))


def _decode(engine: Engine, asked: list[str], salt: str, steps: int, until: float) -> None:
    cost, longest = engine.cost, engine.config.max_model_len
    length, running = min(longest - 1, PROMPT + 4 * steps * len(ROWS)), 0
    for rows in ROWS:
        seconds = cost.prompt_seconds(PROMPT * (rows - running), 0.0)
        seconds += (steps + 1) * cost(rows) if cost.measured else 0.0
        if rows > engine.config.max_num_seqs or engine.clock() + seconds > until:
            break
        for _ in range(rows - running):
            _add(engine, asked, salt, min(PROMPT, length), max(1, length - PROMPT))
        running = rows
        for _ in range(steps + 1):
            engine.step()
        if rows == 1 and engine.clock() + cost.prompt_seconds(CHUNK, 0.0) <= until:
            _add(engine, asked, salt, min(CHUNK, longest - 1), 1)
            for _ in range(steps):
                engine.step()


def _add(engine: Engine, asked: list[str], salt: str, prompt: int, tokens: int) -> None:
    """One more request, which finds nothing in the cache."""
    name = f"{salt}-{len(asked)}"
    asked.append(engine.add([1] * prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True,
                                                         cache_salt=name), speculation=None, request_id=name))
