"""How often speculation meets a numerical tie in the default mode: greedy answers in plain torch, with and without it.

Plain torch sums in another order when a pass has more rows, so the logits of one position differ a little between a
decode step and a verification. Where two tokens are closer than that, either may come out on top. For every answer
that differs, its first difference is looked at: the tokens before it are the same both ways, so they are fed again,
teacher-forced, in passes of several widths, and

- deviation: the largest absolute difference, over the whole vocabulary, of that position's logits between any two of
  these passes. The first is one row at a time, as plain decoding does it; each wider one feeds the answer so far in
  passes of that many rows, with the position as the last row of its pass and once more as the first, before
  drafts;
- gap: by how much the lesser of the two candidates is below the highest logit, one row at a time;
- a tie: gap <= deviation, and the deviation is no more than rounding can explain (ROUNDING of the largest absolute
  logit), so that a verification that computes something else cannot excuse itself.

Greedy answers without penalties are compared, so the processed scores are the logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.bench.questions import read_questions
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.engine.build import choose_device
from paceline.engine.core import Engine
from paceline.engine.schedule.sequence import Sequence as EngineSequence
from paceline.engine.schedule.step import RowGroup
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.request import Request, RequestOutput, SamplingParams
from paceline.speculation.spec import parse

ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Share of the largest absolute logit above which a deviation counts as a mistake, not as rounding. Chosen, not
derived: it is there so that an error of the verification cannot make its own consequences look like ties."""
SAMPLES = 8
"""Answers that do not differ and are measured too, so that there is a deviation even where nothing differs."""


def rounding(dtype: str) -> float:
    """The share of a data type, by its name."""
    if dtype not in ROUNDING:
        raise ConfigError(f"ties knows how much rounding explains in {', '.join(ROUNDING)}, not in {dtype!r}: "
                          "choose one of these with --dtype.")
    return ROUNDING[dtype]


@dataclass(frozen=True)
class Deviation:
    """The logits of one position, computed in passes of several widths."""

    single: torch.Tensor
    """[V] one row at a time."""
    largest: float
    """Largest absolute difference between any two passes, over the vocabulary."""
    limit: float = ROUNDING["float32"]
    """The largest share of the highest logit that rounding can explain."""

    @property
    def share(self) -> float:
        return self.largest / max(float(self.single.abs().max()), 1e-30)

    @property
    def rounding(self) -> bool:
        return self.share <= self.limit

    def gap(self, *tokens: int) -> float:
        """How far the least of `tokens` is below the highest logit."""
        return float(self.single.max() - self.single[list(tokens)].min())


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs; position counts the answer's tokens from 0."""

    question: str
    position: int
    plain: int
    drafted: int
    gap: float
    deviation: float
    rounding: bool

    @property
    def tie(self) -> bool:
        return self.rounding and self.gap <= self.deviation

    def as_row(self) -> dict[str, Any]:
        note = (f"tokens {self.plain} (plain) and {self.drafted}, deviation {self.deviation:.3g}: "
                f"{'a tie' if self.tie else 'NOT A TIE'}")
        row = Row(f"question {self.question}, token {self.position}", "gap", self.gap, note=note).as_dict()
        return row | {"question": self.question, "position": self.position, "plain_token": self.plain,
                      "drafted_token": self.drafted, "gap": self.gap, "deviation": self.deviation, "tie": self.tie}


def first_difference(plain: Sequence[int], drafted: Sequence[int]) -> int | None:
    """None: they are the same. A text that ends does so with a token of its own, so one that is the beginning of the
    other was cut short by something else than a token."""
    if list(plain) == list(drafted):
        return None
    for place, (ours, theirs) in enumerate(zip(plain, drafted)):
        if ours != theirs:
            return place
    raise PacelineError(f"One answer is the beginning of the other ({len(plain)} and {len(drafted)} tokens): they do "
                        "not differ by a token; look for a request that was cut short.")


def deviate(engine: Engine, prompt: Sequence[int], answer: Sequence[int], following: Sequence[int],
            widths: Sequence[int]) -> Deviation:
    """The logits after prompt + answer, in passes of one row and of each of `widths`. `following` (not empty) stands
    for the drafts after the position. Runs beside the requests of the engine, which must be at rest."""
    limit = rounding(str(engine.runner.storage.keys[0].dtype).removeprefix("torch."))
    tokens = [*prompt, *answer]
    end = len(tokens)
    room = engine.config.max_model_len - end
    widest = max(widths)
    drafts = (list(following) * widest)[:min(widest - 1, room)]
    sequence = EngineSequence(Request("ties", tokens, SamplingParams(), 0, 1, 0.0, None, None, None), 0, 0)
    allocation = engine.cache.open(tokens, reuse=False)
    if allocation is None or engine.cache.reserve(allocation, 0, end + len(drafts)) is None:
        if allocation is not None:
            engine.cache.close(allocation)
        raise ConfigError(f"The cache has no room to feed {end} tokens again: lower --batch.")
    sequence.allocation = allocation

    def feed(begin: int, rows: Sequence[int], logits_from: int = 0) -> torch.Tensor:
        """Rows from `begin` on in one pass; the logits of those from `logits_from` on."""
        return engine.runner.run_batch(engine.batches.build(
            [RowGroup(sequence, begin, list(rows), logits_from=logits_from)])).logits

    def chunks(begin: int, width: int) -> torch.Tensor:
        """tokens[begin:] in passes of at most `width`; the logits after the last. Its whole pass goes through the
        output layer, as in a verification: that product depends on the number of rows, too."""
        for start in range(begin, end, width):
            rows = tokens[start:start + width]
            logits = feed(start, rows, 0 if start + width >= end else len(rows))
        return logits[-1]

    try:
        found: list[torch.Tensor] = []
        prefill = engine.config.max_batch_tokens
        for start in range(0, len(prompt), prefill):
            rows = list(prompt[start:start + prefill])
            feed(start, rows, len(rows) - 1)
        for width in sorted({1, *widths}):
            # Full passes up to the end; a wide one may begin inside the prompt and writes its entries anew.
            begin = max(0, end - -(-max(len(answer), 1) // width) * width)
            found.append(chunks(begin, width))
            if width > 1:
                found.append(feed(end - 1, [tokens[-1], *drafts[:width - 1]])[0])
    finally:
        engine.cache.close(sequence.allocation)
    every = torch.stack(found)
    return Deviation(found[0], float((every.amax(0) - every.amin(0)).max()), limit)


def compare(engine: Engine, names: Sequence[str], prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]],
            drafted: Sequence[Sequence[int]], widths: Sequence[int], samples: int = SAMPLES
            ) -> tuple[list[Difference], list[float]]:
    """The first difference of every answer that has one; and all deviations that were measured: at the differences
    and at the ends of `samples` answers without one, spread over all of them."""
    differences: list[Difference] = []
    deviations: list[float] = []
    places = [first_difference(*both) for both in zip(plain, drafted)]
    same = [index for index, place in enumerate(places) if place is None and plain[index]]
    chosen = set(same[::max(1, len(same) // samples)][:samples]) if samples else set()
    for index, place in enumerate(places):
        if place is None and index not in chosen:
            continue
        at = len(plain[index]) - 1 if place is None else place
        measured = deviate(engine, prompts[index], plain[index][:at], plain[index][at:], widths)
        deviations.append(measured.largest)
        if place is not None:
            pair = plain[index][at], drafted[index][at]
            differences.append(Difference(names[index], at, *pair, measured.gap(*pair), measured.largest,
                                          measured.rounding))
            say(f"ties: question {names[index]} differs at token {at}: gap {differences[-1].gap:.3g}, deviation "
                f"{measured.largest:.3g}")
    return differences, deviations


def answers(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, wish: Any, minutes: float | None = None
            ) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Greedy answers to all prompts, plain and drafted, in portions that take turns; after `minutes` no portion is
    begun, and the prompts after it are left out. Both find the same cache entries of a prompt, so what differs comes
    from decoding."""
    both: tuple[list[RequestOutput], list[RequestOutput]] = ([], [])
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    portion = 2 * llm.engine.config.max_num_seqs
    begun = time.monotonic()
    for begin in range(0, len(prompts), portion):
        if begin and minutes is not None and time.monotonic() - begun > 60.0 * minutes:
            say(f"ties: {minutes:g} minutes are over, {len(prompts) - begin} prompts are left out")
            break
        for outs, speculation in zip(both, (None, wish)):
            outs += llm.generate(list(prompts[begin:begin + portion]), params, speculation=speculation)
            say(f"ties: {len(outs)} of {len(prompts)} answers, {'plain' if speculation is None else 'drafted'}")
    for out in (*both[0], *both[1]):
        if out.error is not None:
            raise out.error
    return both


def run(dataset: str | Path, prompts: int = 200, max_tokens: int = 128, method: str = "ngram", k: int = 4,
        batch: int = 16, model: str | None = None, minutes: float | None = None, llm: LLM | None = None,
        device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """The bench document; its settings say how many prompts there was time for. `llm`: an engine that is there
    already, instead of `model` and `batch`."""
    for name, value in (("prompts", prompts), ("max-tokens", max_tokens), ("batch", batch), ("k", k)):
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}.")
    wish = {"method": method, "k": k, "adaptive": False}
    parse(wish)
    limit = rounding(dtype)
    choose_device(device)
    questions = read_questions(dataset)[:prompts]
    llm = llm or LLM(model, device=device, dtype=dtype, kernels="eager", max_num_seqs=batch)
    engine = llm.engine
    rendered = [_render(llm, question.turns[0]) for question in questions]
    plain, drafted = answers(llm, rendered, max_tokens, wish, minutes)
    seats = engine.config.max_num_seqs
    widths = sorted({k + 1, seats, seats * (k + 1)})
    ours, theirs = ([out.outputs[0].token_ids for out in outs] for outs in (plain, drafted))
    differences, deviations = compare(engine, [question.id for question in questions], rendered, ours, theirs, widths)

    count, tokens = len(plain), sum(map(len, ours))
    stats = [out.speculation for out in drafted if out.speculation is not None]
    rows = [Row("prompts", "prompts", count), Row("plain answers", "tokens", tokens),
            Row("drafted", "tokens", sum(one.drafted for one in stats)),
            Row("accepted", "tokens", sum(one.accepted for one in stats)),
            Row("differing", "prompts", len(differences), higher_is_better=False),
            Row("of them ties", "prompts", sum(one.tie for one in differences)),
            Row("largest deviation", "logit", max(deviations, default=0.0), higher_is_better=False,
                note=f"at {len(deviations)} positions, passes of 1, {', '.join(map(str, widths))} rows")]
    result = document(rows, dataset=Path(dataset).name, model=model or "default", kernels=engine.kernels.name,
                      prompts=count, max_tokens=max_tokens, speculation=wish, batch=seats, widths=[1, *widths],
                      device=device, dtype=dtype, rounding=limit)
    result["rows"] += [one.as_row() for one in differences]
    return result


def only_ties(result: dict[str, Any]) -> bool:
    """Whether every difference in a document of run() is a tie."""
    return all(row.get("tie", True) for row in result["rows"])


def _render(llm: LLM, question: str) -> list[int]:
    """A model without a chat template gets the bare question."""
    if llm.engine.chat is not None:
        return llm.render([{"role": "user", "content": question}])
    if llm.engine.tokenizer is None:
        raise ConfigError("This model has no tokenizer: it cannot read questions; choose another --model.")
    return llm.engine.tokenizer.encode(question)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/ties.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="a JSON object a line: question_id, category, turns")
    parser.add_argument("--prompts", type=int, default=200, help="first turns of so many questions")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--k", type=int, default=4, help="draft tokens a step, always")
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--minutes", type=float, default=None, help="leave out what is not begun by then")
    json_argument(parser)
    given = parser.parse_args(arguments)
    try:
        result = run(given.dataset, given.prompts, given.max_tokens, given.method, given.k, given.batch, given.model,
                     given.minutes, device=given.device, dtype=given.dtype)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    emit(result, given.json)
    if not only_ties(result):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
