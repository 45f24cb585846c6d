"""Answers by the target, made by the engine itself: as many at once as it has room for, paused and taken up again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.request import RequestOutput, SamplingParams
from paceline.training.jobs import Jobs
from paceline.training.shards import Text


class Keeper(Protocol):
    """Who gets the answers: shards on disk, or the way to the process that has them."""

    done: set[int]
    """Jobs that need not be done again."""

    def add(self, texts: list[Text], left_out: list[int]) -> None:
        """What was made since the last time."""
        ...


@dataclass
class Order:
    """The answers first, first + stride, ... below last of `jobs` that `keeper` lacks."""

    jobs: Jobs
    keeper: Keeper
    first: int
    last: int
    greedy: bool = False
    """Whatever temperature a job says."""
    stride: int = 1
    running: int = 0
    texts: list[Text] = field(default_factory=list)
    """Made, and not yet with the keeper."""
    left_out: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._skip()

    def _skip(self) -> None:
        while self.first < self.last and self.first in self.keeper.done:
            self.first += self.stride

    def next(self) -> int | None:
        """The number of the next answer to make; None: there is none left."""
        if self.first >= self.last:
            return None
        index, self.first = self.first, self.first + self.stride
        self._skip()
        return index

    @property
    def finished(self) -> bool:
        return self.first >= self.last and not self.running

    def flush(self) -> list[Text]:
        texts, left_out = self.texts, self.left_out
        self.texts, self.left_out = [], []
        self.keeper.add(texts, left_out)
        return texts


class AnswerMaker:
    """Makes what is ordered, one order after the other but without a break between them. Between two calls of `run`
    answers that have begun wait in the engine, so that short turns cost nothing: no batch ever runs empty."""

    def __init__(self, llm: LLM, orders: list[Order], new_tokens: int) -> None:
        self._engine = llm.engine
        self.orders = orders
        """May grow."""
        self._new_tokens = new_tokens
        self._running: dict[str, tuple[Order, int]] = {}
        self._ahead = 2 * llm.engine.config.max_num_seqs
        self.tokens = 0
        """Of answers made so far."""
        self.seconds = 0.0

    @property
    def finished(self) -> bool:
        return all(order.finished for order in self.orders)

    def run(self, enough: Callable[[], bool]) -> list[list[Text]]:
        """Until all are made or `enough()` says so. What each order got, with its keeper when this returns."""
        begin = time.perf_counter()
        while not self.finished and not enough():
            self._feed()
            if self._running:
                self._step()
        made = [order.flush() for order in self.orders]
        self.seconds += time.perf_counter() - begin
        return made

    def _step(self) -> None:
        for record in self._engine.step():
            if record.open == 0 and record.request.id in self._running:
                order, index = self._running.pop(record.request.id)
                order.running -= 1
                text = _text(index, self._engine.take(record.request.id).snapshot())
                if text is None:
                    order.left_out.append(index)
                else:
                    order.texts.append(text)
                    self.tokens += text.answer

    def _feed(self) -> None:
        for order in self.orders:
            while len(self._running) < self._ahead and (index := order.next()) is not None:
                self._begin(order, index)

    def _begin(self, order: Order, index: int) -> None:
        job = order.jobs.job(index)
        try:
            if job is None:
                order.left_out.append(index)
                return
            temperature = 0.0 if order.greedy else job.temperature
            params = SamplingParams(max_tokens=self._new_tokens, temperature=temperature, seed=job.seed)
            self._running[self._engine.add(job.prompt, params, speculation=None)] = order, index
            order.running += 1
        except PacelineError:  # this prompt cannot be answered, whatever the reason
            order.left_out.append(index)

    def close(self) -> None:
        """What has begun is dropped."""
        for request_id in self._running:
            self._engine.cancel(request_id)
            self._engine.take(request_id)
        self._running.clear()


def _text(index: int, output: RequestOutput) -> Text | None:
    """None: there is nothing to learn from."""
    answer = output.outputs[0].token_ids
    if output.error is not None or len(answer) < 2:
        return None
    tokens = np.array([*output.prompt_token_ids, *answer], np.int32)
    return Text(index, tokens, len(tokens) - len(answer))
