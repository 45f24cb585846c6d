"""Which error is which answer: what a request did wrong, what the engine did, when to come back."""

from __future__ import annotations

import pytest

from paceline.errors import (
    EmptySupportError,
    GrammarError,
    NotYetError,
    PacelineError,
    QueueFullError,
    RequestError,
    StepError,
)
from paceline.serve.errors import api_error


@pytest.mark.parametrize("problem, status, code", [
    (RequestError("no field is named"), 400, None), (RequestError("it is too long", "prompt"), 400, None),
    (EmptySupportError("nothing is left"), 400, None), (GrammarError("cannot be kept", "regex"), 400, None),
    (StepError("the model produced NaN"), 500, "engine_error"), (NotYetError("later"), 400, "not_supported"),
    (QueueFullError("full"), 429, "queue_full"), (PacelineError("it has ended"), 503, "unavailable"),
])
def test_the_class_of_an_error_decides_its_status(problem: PacelineError, status: int, code: str | None) -> None:
    told = api_error(problem)
    assert (told.status_code, told.code) == (status, code)
    assert told.param == getattr(problem, "param", None) or status != 400


@pytest.mark.parametrize("seconds, header", [(None, "1"), (0.0, "1"), (0.2, "1"), (7.2, "8"), (90.0, "90"),
                                             (1e9, "300")])
def test_who_finds_the_queue_full_is_told_when_to_come_back(seconds: float | None, header: str) -> None:
    assert dict(api_error(QueueFullError("full", seconds)).headers or {}) == {"retry-after": header}
