"""Answers by the target, made by the engine itself: as many at once as it has room for, paused and taken up again."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.training.jobs import Jobs
from paceline.training.shards import Shards, Text


class AnswerMaker:
    """Makes the answers first .. last - 1 of `jobs` that `shards` lacks. Between two calls of `run` those that have begun
    wait in the engine, so that short turns cost nothing: no batch ever runs empty."""

    def __init__(self, llm: LLM, jobs: Jobs, shards: Shards, first: int, last: int, new_tokens: int,
                 greedy: bool = False) -> None:
        """`greedy`: whatever temperature a job says."""
        self._engine = llm.engine
        self._jobs = jobs
        self._shards = shards
        self._next, self._last = first, last
        self._new_tokens = new_tokens
        self._greedy = greedy
        self._running: dict[str, int] = {}
        self._ahead = 2 * llm.engine.config.max_num_seqs
        self.tokens = 0
        """Of answers made by this object."""
        self.seconds = 0.0

    @property
    def finished(self) -> bool:
        return self._next >= self._last and not self._running

    def run(self, enough: Callable[[int], bool]) -> list[Text]:
        """Until all are made or `enough(answers made in this turn)` says so; on disk when this returns."""
        begin = time.perf_counter()
        texts, left_out = list[Text](), list[int]()
        while not self.finished and not enough(len(texts)):
            self._feed(left_out)
            if not self._running:
                continue
            for record in self._engine.step():
                if record.open == 0 and record.request.id in self._running:
                    index = self._running.pop(record.request.id)
                    output = self._engine.take(record.request.id).snapshot()
                    answer = output.outputs[0].token_ids
                    if output.error is not None or len(answer) < 2:
                        left_out.append(index)
                        continue
                    tokens = np.array([*output.prompt_token_ids, *answer], np.int32)
                    texts.append(Text(index, tokens, len(tokens) - len(answer)))
                    self.tokens += len(answer)
        self._shards.add(texts, left_out)
        self.seconds += time.perf_counter() - begin
        return texts

    def _feed(self, left_out: list[int]) -> None:
        while self._next < self._last and len(self._running) < self._ahead:
            index, self._next = self._next, self._next + 1
            if index in self._shards.done:
                continue
            job = self._jobs.job(index)
            if job is None:
                left_out.append(index)
                continue
            temperature = 0.0 if self._greedy else job.temperature
            params = SamplingParams(max_tokens=self._new_tokens, temperature=temperature, seed=job.seed)
            try:
                self._running[self._engine.add(job.prompt, params, speculation=None)] = index
            except PacelineError:
                left_out.append(index)

    def close(self) -> None:
        """What has begun is dropped."""
        for request_id in self._running:
            self._engine.cancel(request_id)
            self._engine.take(request_id)
        self._running.clear()
