"""Source: where the texts of a run come from, as learning sees it. They are made (Supply) or those of another run
(GivenTexts)."""

from __future__ import annotations

from typing import Protocol

from paceline.errors import ConfigError
from paceline.training.pool import Pool
from paceline.training.shards import Text


class Source(Protocol):
    pool: Pool

    @property
    def beside(self) -> bool:
        """Are answers made beside training?"""
        ...

    @property
    def rate(self) -> float:
        """Tokens of answers that are made in a second."""
        ...

    def first_answers(self, resumed: bool) -> list[Text]:
        """The held-out texts, when the pool has enough to begin with."""
        ...

    def between_steps(self, step: int) -> float:
        """New texts may come into the pool now. How many seconds training waited."""
        ...

    def too_short(self) -> ConfigError:
        """Time was over before the first step."""
        ...

    def flush(self) -> None:
        """All that is in the pool is on disk when this returns."""
        ...

    def end(self) -> None:
        """No more texts are needed."""
        ...

    def close(self) -> None:
        """At once, whatever is going on."""
        ...
