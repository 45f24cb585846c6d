"""The native CPU path beside llama.cpp and onnxruntime: the same prompts, token counts and threads, in turn."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.bench import cpu_answers
from paceline.bench.cpu_peers import REST_S, MeasuredEngine, available, median_ms
from paceline.bench.cpu_quality import Qualities, compare, reference
from paceline.bench.latency import decode_rate, prefill_rate, prompt_of
from paceline.bench.questions import Question
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.engine.schedule.sequence import Sequence as EngineSequence
from paceline.engine.schedule.step import RowGroup
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.models.load.resolve import resolve
from paceline.request import Request, SamplingParams

SHORT = 64
"""Tokens before the first measured one, wherever a case does not say otherwise."""
LONG = 4096
STEP_ROWS = (1, 2, 3, 4, 6, 8, 16, 32)


class Paceline:
    """Whole requests go through the whole engine: scheduling, sampling and detokenising are counted. A step is
    ModelRunner.run_batch: laying out the rows, the forward and the logits of every row."""

    name = "paceline"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.vocab_size = llm.engine.model.config.vocab_size
        self.prefill([token % self.vocab_size for token in range(SHORT)])

    def decode(self, prompt: list[int], new_tokens: int) -> float:
        return decode_rate(self._llm, prompt, new_tokens)

    def prefill(self, prompt: list[int]) -> float:
        return prefill_rate(self._llm, prompt)

    def batch(self, prompts: list[list[int]], new_tokens: int) -> float:
        engine = self._llm.engine
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        ids = [engine.add(prompt, params) for prompt in prompts]
        records = [engine.record(request) for request in ids]

        def written() -> int:
            return sum(record.metrics.output_tokens for record in records)

        while any(record.metrics.output_tokens == 0 for record in records):
            engine.step()
        already, begin = written(), time.perf_counter()
        # Until the first ends: all of them decode in every step.
        while all(record.open for record in records):
            engine.step()
        rate = (written() - already) / (time.perf_counter() - begin)
        while engine.has_work:
            engine.step()
        for request in ids:
            engine.take(request)
        return rate

    def step(self, prefix: list[int], tokens: list[int]) -> float:
        engine = self._llm.engine
        with self._seated(prefix, len(prefix) + len(tokens)) as sequence:
            for begin in range(0, len(prefix), 512):
                part = prefix[begin:begin + 512]
                chunk = RowGroup(sequence, begin, part, logits_from=len(part) - 1)
                engine.runner.run_batch(engine.batches.build([chunk]))
            rows = [RowGroup(sequence, len(prefix), tokens)]
            return median_ms(lambda: None, lambda: _ignore(engine.runner.run_batch(engine.batches.build(rows))))

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        engine = self._llm.engine
        with self._seated(tokens, len(tokens)) as sequence:
            parts = [RowGroup(sequence, begin, tokens[begin:begin + 512]) for begin in range(0, len(tokens), 512)]
            found = [engine.runner.run_batch(engine.batches.build([part])).logits for part in parts]
            return torch.cat(found).float().numpy()

    @contextmanager
    def _seated(self, tokens: list[int], length: int) -> Iterator[EngineSequence]:
        """A sequence that begins with these and has room for so many, past the scheduler."""
        cache = self._llm.engine.cache
        sequence = EngineSequence(Request("measured", tokens, SamplingParams(), 0, 1, 0.0, None, None, None), 0, 0)
        allocation = cache.open(tokens)
        assert allocation is not None  # nobody else has any of the cache
        sequence.allocation = allocation
        try:
            cache.reserve(allocation, 0, length)
            yield sequence
        finally:
            cache.close(allocation)


def _ignore(_: Any) -> None: ...


class Neighbours:
    """How much of the machine other processes use meanwhile: engines whose threads wait for one another at every
    layer lose far more than that share, so figures from a busy machine compare nothing."""

    LIMIT = 0.05

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begin = self._read()

    def share(self) -> float | None:
        """Of all cores, since this was made; None where the system does not tell."""
        before, now = self._begin, self._read()
        if before is None or now is None or now[1] <= before[1]:
            return None
        busy, total, own = (b - a for a, b in zip(before, now))
        return min(1.0, max(0.0, (busy - own) / total))

    def _read(self) -> tuple[float, float, float] | None:
        """Seconds so far: all processes busy, all cores busy or not, this process."""
        try:
            ticks = [int(part) for part in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        own = os.times()
        idle = ticks[3] + ticks[4]  # idle, and waiting for input
        hertz = os.sysconf("SC_CLK_TCK")
        return (sum(ticks) - idle) / hertz, sum(ticks) / hertz, own.user + own.system


@dataclass(frozen=True)
class Case:
    """What is asked of every contender. most_turns: the long ones are not repeated as often."""

    name: str
    unit: str
    measure: Callable[[MeasuredEngine, int], float]
    """(contender, vocabulary size) -> figure"""
    higher_is_better: bool = True
    most_turns: int = 99
    note: str = ""


def _decode(prompt: int, new_tokens: int) -> Callable[[MeasuredEngine, int], float]:
    return lambda who, vocab: who.decode(prompt_of(prompt, vocab), new_tokens)


def _prefill(length: int) -> Callable[[MeasuredEngine, int], float]:
    return lambda who, vocab: who.prefill(prompt_of(length, vocab))


def _batch(count: int, new_tokens: int) -> Callable[[MeasuredEngine, int], float]:
    return lambda who, vocab: who.batch([prompt_of(SHORT, vocab, salt) for salt in range(count)], new_tokens)


def _step(rows: int) -> Callable[[MeasuredEngine, int], float]:
    return lambda who, vocab: who.step(prompt_of(SHORT, vocab), prompt_of(rows, vocab, 1))


CASES: dict[str, Case] = {case.name: case for case in (
    Case("decode", "tok/s", _decode(SHORT, 128)),
    Case("prefill_512", "tok/s", _prefill(512)),
    Case("prefill_2048", "tok/s", _prefill(2048), most_turns=2),
    Case("batch_8", "tok/s", _batch(8, 64)),
    Case("batch_32", "tok/s", _batch(32, 32), most_turns=2),
    Case("context_4096", "tok/s", _decode(LONG, 32), most_turns=2),
    *(Case(f"step_{rows}", "ms", _step(rows), higher_is_better=False) for rows in STEP_ROWS),
)}


@dataclass(frozen=True)
class Chosen:
    cases: list[Case]
    questions: list[Question]
    """Of the case `answers`; without any it is not among those chosen."""


def choose(text: str | None, dataset: str | None = None, per_category: int | None = None) -> Chosen:
    """Cases by name, separated by commas; "step" means all steps, None everything but `answers`. In the order of
    CASES. `dataset`, `per_category`: which questions, None for those that come along and a few of each category."""
    names = list(CASES) if text is None else [part.strip() for part in text.split(",")]
    answers = cpu_answers.NAME in names
    if not answers and (dataset is not None or per_category is not None):
        raise ConfigError("--dataset and --per-category are for the case answers: name it in --cases, or leave them "
                          "out.")
    wanted: set[str] = set()
    for name in names:
        chosen = [case for case in CASES if case == name or (name == "step" and case.startswith("step_"))]
        if not chosen and name != cpu_answers.NAME:
            raise ConfigError(f"There is no case {name!r}: use {', '.join(CASES)}, {cpu_answers.NAME}, or step for "
                              "all steps.")
        wanted.update(chosen)
    return Chosen([case for name, case in CASES.items() if name in wanted],
                  cpu_answers.questions(dataset, per_category) if answers else [])


def measure(cases: Sequence[Case], contenders: Sequence[MeasuredEngine], vocab_size: int, repeats: int
            ) -> dict[str, dict[str, float]]:
    """case -> contender -> its best figure, everybody in turn within every turn."""
    best: dict[str, dict[str, float]] = {case.name: {} for case in cases}
    for turn in range(repeats):
        for case in cases:
            if turn >= case.most_turns:
                continue
            for who in contenders:
                gc.collect()
                time.sleep(REST_S)
                figure = case.measure(who, vocab_size)
                say(f"cpu: {case.name}, run {turn + 1} of {min(repeats, case.most_turns)}: {who.name} "
                    f"{figure:.4g} {case.unit}")
                so_far = best[case.name].get(who.name, figure)
                best[case.name][who.name] = (max if case.higher_is_better else min)(so_far, figure)
    return best


def rows_of(cases: Sequence[Case], best: dict[str, dict[str, float]], qualities: Qualities | None = None) -> list[Row]:
    """A row a case; where decode was measured at both lengths, also what is left of the speed at the long one. With
    qualities there are rows of those as well, and ratios against the peers that are as good."""
    rows = []
    equals = None if qualities is None else qualities.equals(Paceline.name)
    for case in cases:
        figures = dict(best[case.name])
        rows.append(Row(case.name, case.unit, figures.pop(Paceline.name), figures, case.higher_is_better, case.note,
                        equals))
        if case.name == "context_4096" and "decode" in best:
            kept = {who: figure / best["decode"][who] for who, figure in best[case.name].items()}
            rows.append(Row("context_4096_share", "of decode", kept.pop(Paceline.name), kept,
                            note=f"speed at {LONG} tokens of context over the speed at {SHORT}, each engine by itself"))
    return rows if qualities is None else rows + qualities.rows(Paceline.name)


def run(model: str | None = None, cases: str | None = None, peers: bool = False, repeats: int = 3,
        threads: int | None = None, kv_dtype: str = "auto", text: str | None = None, dataset: str | None = None,
        per_category: int | None = None) -> dict[str, Any]:
    """Every figure is the best of `repeats` turns; a step's is the median of its runs within a turn. `text`: also how
    near everybody is to the file's weights in float32 on it. `dataset`, `per_category`: see choose()."""
    chosen = choose(cases, dataset, per_category)
    threads = threads or torch.get_num_threads()
    llm = LLM(model, device="cpu", enable_prefix_caching=False, threads=threads, kv_dtype=kv_dtype)
    ours = Paceline(llm)
    others, missing = available(resolve(model), threads) if peers else ([], [])
    for line in missing:
        say(f"cpu: {line}")
    if others and text is None:
        say("cpu: whose answers are as good is not measured: give a text with --text")
    qualities = None if text is None else compare([ours, *others], *reference(model, text, threads))
    prompts = cpu_answers.prompts_of(llm, chosen.questions) if chosen.questions else []
    neighbours = Neighbours()
    rows = rows_of(chosen.cases, measure(chosen.cases, [ours, *others], ours.vocab_size, repeats), qualities)
    if prompts:
        equals = None if qualities is None else qualities.equals(ours.name)
        rows += cpu_answers.run(llm, others, prompts, repeats, equals)
    busy = neighbours.share()
    if busy is not None and busy > Neighbours.LIMIT:
        say(f"cpu: other processes used {busy:.0%} of the machine meanwhile: measure again when it is idle")
    return document(rows, model=model or "default", kernels=llm.engine.kernels.name, threads=threads,
                    kv_dtype=kv_dtype, repeats=repeats, left_out=missing, used_by_others=busy)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.cpu", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--cases", default=None, help=f"separated by commas: {', '.join(CASES)}; step: all steps; "
                        "answers: questions, takes minutes; default: all but answers")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp and onnxruntime-genai where installed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--text", default=None, help="UTF-8 text, plain or .gz, on which agreement is measured")
    parser.add_argument("--dataset", default=None, help="questions of answers, a JSON object a line: question_id, "
                        "category, turns; default: a few that come along")
    parser.add_argument("--per-category", type=int, default=None, help=f"questions of each category; 0: all; default: "
                        f"{cpu_answers.PER_CATEGORY}")
    json_argument(parser)
    given = parser.parse_args()
    try:
        result = run(given.model, given.cases, given.peers, given.repeats, given.threads, given.kv_dtype, given.text,
                     given.dataset, given.per_category)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    emit(result, given.json)


if __name__ == "__main__":
    main()
