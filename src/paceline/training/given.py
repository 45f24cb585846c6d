"""Texts of another run, learned from as they are: nothing is made, and nothing is written to where they lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError, ModelFormatError
from paceline.training.options import TrainOptions
from paceline.training.pool import Pool
from paceline.training.shards import MANIFEST, Manifest, Text, read_manifest

TEXTS, HELD_OUT = "texts", "held_out"
AGAIN = "copy it again from the run that made it, or name another run with --texts."


@dataclass(frozen=True)
class OtherRun:
    """What a run left in its OUT/data."""

    folder: Path
    texts: Manifest
    held_out: Manifest

    @classmethod
    def open(cls, folder: Path) -> OtherRun:
        """`folder`: a run's --out, or the data in it."""
        data = folder / "data" if (folder / "data").is_dir() else folder
        for part in (TEXTS, HELD_OUT):
            if not (data / part / MANIFEST).is_file():
                raise ConfigError(f"--texts: {folder} holds no answers ({data / part / MANIFEST} is not there): name "
                                  "the --out of a run that has made some.")
        return cls(data, *(read_manifest(data / part, AGAIN) for part in (TEXTS, HELD_OUT)))

    def fit(self, options: TrainOptions) -> TrainOptions:
        """Texts are as long as that run allowed."""
        lengths = {name: self.texts.settings.get(name) for name in ("prompt_tokens", "new_tokens")}
        if not all(isinstance(value, int) for value in lengths.values()):
            raise ConfigError(f"{self.texts.folder / MANIFEST} does not say how long its texts may be: {AGAIN}")
        return replace(options, **lengths)  # type: ignore[arg-type]

    def read(self, target: dict[str, str | None]) -> tuple[list[Text], list[Text]]:
        """Those to learn from and those held out, for a target of this identity."""
        for part in (self.texts, self.held_out):
            other = [name for name, value in target.items() if part.settings.get(name) != value]
            if other:
                raise ConfigError(f"The answers in {part.folder} are another target's ({', '.join(other)}): heads "
                                  "learn from answers of the target they draft for. Name that one with --model, or "
                                  "another run with --texts.")
        try:
            texts, held_out = ([text for text in part.read() if text.answer > least]
                               for part, least in ((self.texts, 1), (self.held_out, 2)))
        except ModelFormatError as error:
            raise ConfigError(f"A shard in {self.folder} cannot be read ({error}): {AGAIN}") from None
        if not texts or not held_out:
            raise ConfigError(f"--texts: {self.folder} has {len(texts)} answers to learn from and {len(held_out)} held "
                              "out, and both are needed: let that run make some first.")
        return texts, held_out


class GivenTexts:
    """A Source that has everything from the first."""

    beside = False
    rate = 0.0

    def __init__(self, options: TrainOptions, pool: Pool, run: OtherRun, target: dict[str, str | None]) -> None:
        self.options, self.pool = options, pool
        texts, self._held_out = run.read(target)
        pool.add(texts)

    def first_answers(self, resumed: bool) -> list[Text]:
        return self._held_out

    def between_steps(self, step: int) -> float:
        return 0.0

    def too_short(self) -> ConfigError:
        return ConfigError(f"{self.options.minutes:g} minutes were over before the first step, so no head is written: "
                           "give more --minutes.")

    def flush(self) -> None:
        """They are on disk."""

    def end(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""
