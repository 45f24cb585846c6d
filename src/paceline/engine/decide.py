"""Decide: from a step's logits to each sequence's new tokens, through one pipeline for plain rows and drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.engine.outputs import Emitter, Record
from paceline.engine.runner import StepLogits
from paceline.engine.sequence import Sequence, Status
from paceline.engine.step import GroupResult, RowGroup, Step
from paceline.errors import PacelineError
from paceline.request import TokenLogprob
from paceline.sampling.logprobs import prompt_logprobs, token_logprobs
from paceline.sampling.pipeline import Pipeline, Processed, SampleRow
from paceline.sampling.trace import Trace, TraceToken
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import Verdict, coupled

PLAIN = ("plain",)


@dataclass(slots=True)
class Decision:
    """What a group yielded, with what the scheduler need not know."""

    result: GroupResult
    error: PacelineError | None = None
    draft: DraftTree | None = None
    origins: Seq[str] = PLAIN
    """Per token: plain, accepted, corrected or bonus."""
    siblings: Seq[Decision] = ()


@dataclass(slots=True)
class _Draw:
    """Rows of the pipeline that belong to one sequence of one group."""

    seq: Sequence
    first: int
    group: RowGroup


class Decider:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def decide(self, step: Step, out: StepLogits) -> list[Decision]:
        """One decision per group, in order; empty for groups that sample nothing or whose sequence is gone."""
        draws: list[_Draw | Decision] = []
        rows: list[SampleRow] = []
        wanted: list[int] = []
        for group, first in zip(step.groups, out.first):
            seq = group.seq
            if first < 0 or seq.status is Status.FINISHED:
                draws.append(Decision(GroupResult([])))
                continue
            if seq.request.params.prompt_logprobs is not None:
                try:
                    _score_prompt(group, out.logits, first, seq.record)
                except PacelineError as problem:
                    draws.append(_ended(group, "error", problem))
                    continue
            if not _reaches_end(group):
                draws.append(Decision(GroupResult([])))
                continue
            if seq.request.max_tokens == 0:
                draws.append(_ended(group, "length"))
                continue
            draws.append(_Draw(seq, len(rows), group))
            last = first + len(group.tokens) - group.logits_from - 1
            if group.draft is None:
                rows.append(SampleRow(seq.state, group.start + len(group.tokens)))
                wanted.append(last)
                for sibling in group.siblings:
                    rows.append(SampleRow(sibling.state, group.start + len(group.tokens)))
                    wanted.append(last)
            else:
                rows.extend(_draft_rows(group))
                wanted.extend(range(last + 1 - len(group.draft) - 1, last + 1))
        if rows:
            return self._draw(draws, rows, wanted, out.logits)
        return [draw for draw in draws if isinstance(draw, Decision)]

    def _draw(self, draws: list[_Draw | Decision], rows: list[SampleRow], wanted: list[int], logits: torch.Tensor
              ) -> list[Decision]:
        if len(wanted) != logits.shape[0] or wanted[-1] != len(wanted) - 1:
            logits = logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]
        processed = self._pipeline.process(logits, rows)
        chosen = self._pipeline.choose(processed)
        scribe = _Scribe(logits, processed)
        decisions = [draw if isinstance(draw, Decision) else _settle(draw, chosen, processed, scribe)
                     for draw in draws]
        scribe.write()
        return decisions


def _ended(group: RowGroup, reason: str, error: PacelineError | None = None) -> Decision:
    """A group that ends without a token, its further samples with it."""
    decision = Decision(GroupResult([], finish=reason), error)
    decision.siblings = [Decision(GroupResult([], finish=reason)) for _ in group.siblings]
    decision.result.siblings = [further.result for further in decision.siblings]
    return decision


def _score_prompt(group: RowGroup, logits: torch.Tensor, first: int, record: Record) -> None:
    """Log-probabilities of the prompt tokens that this chunk's rows predict."""
    scores = record.prompt_logprobs
    prompt = record.request.prompt
    if scores is None:
        return
    # After a preemption the same rows come again, perhaps in other chunks: go on where the scores end.
    begin = len(scores) - 1
    end = min(group.start + len(group.tokens), len(prompt) - 1)
    if begin >= end:
        return
    targets = prompt[begin + 1:end + 1]
    row = first + begin - group.start - group.logits_from
    top = record.request.params.prompt_logprobs or 0
    scores.extend(prompt_logprobs(logits[row:row + len(targets)], targets, top))


def _reaches_end(group: RowGroup) -> bool:
    """Whether the group's known tokens are all the sequence has, so that its last row predicts a new one."""
    drafted = 0 if group.draft is None else len(group.draft)
    return group.start + len(group.tokens) - drafted >= len(group.seq.tokens)


def _draft_rows(group: RowGroup) -> list[SampleRow]:
    """One row per draft node and one for the token before them, each knowing the draft tokens above it."""
    state, draft = group.seq.state, group.draft
    base = group.start + len(group.tokens) - len(draft)
    rows = [SampleRow(state, base)]
    paths: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents):
        path = [*paths[parent], token] if parent >= 0 else [token]
        paths.append(path)
        rows.append(SampleRow(state, base + len(path), path))
    return rows


def _settle(draw: _Draw, chosen: list[int], processed: Processed, scribe: _Scribe) -> Decision:
    group, first = draw.group, draw.first
    if group.draft is None:
        decision = _emit_one(draw.seq, chosen[first], first, processed, scribe)
        if group.siblings:
            decision.siblings = [_emit_one(sibling, chosen[row], row, processed, scribe)
                                 for row, sibling in enumerate(group.siblings, first + 1)]
            decision.result.siblings = [further.result for further in decision.siblings]
        return decision
    draft: DraftTree = group.draft
    tokens = [group.seq.tokens[-1], *draft.tokens]
    parents = [-1, *(parent + 1 for parent in draft.parents)]
    verdict = coupled(parents, tokens, chosen[first:first + len(tokens)])
    return _emit_path(draw.seq, verdict, first, draft, processed, scribe)


def _emit_one(seq: Sequence, token: int, row: int, processed: Processed, scribe: _Scribe,
              origin: str = "plain", draft: DraftTree | None = None) -> Decision:
    """Hand one token to the sequence's text; the steady state of plain decoding, so kept lean."""
    if processed.errors and row in processed.errors:
        return Decision(GroupResult([], finish="error"), processed.errors[row])
    if processed.stopped and row in processed.stopped:
        return Decision(GroupResult([], finish="stop"))
    emitter: Emitter = seq.emitter
    if emitter.scored:
        scribe.note(seq, row, token, origin, draft)
    try:
        return Decision(GroupResult([token], (), emitter.push(token)))
    except PacelineError as problem:
        return Decision(GroupResult([token], finish="error"), problem)


def _emit_path(seq: Sequence, verdict: Verdict, first: int, draft: DraftTree, processed: Processed,
               scribe: _Scribe) -> Decision:
    """Hand a verdict's tokens to the sequence's text one by one, until it ends."""
    kept: list[int] = []
    origins: list[str] = []
    last: Decision | None = None
    for index, (token, row) in enumerate(zip(verdict.tokens, verdict.rows)):
        origins.append(_origin(index, verdict, draft))
        last = _emit_one(seq, token, first + row, processed, scribe, origins[-1], draft)
        kept += last.result.tokens
        if last.result.finish is not None:
            break
    if last is None:
        raise ValueError("a verdict has at least one token")
    result = GroupResult(kept, verdict.path[:len(kept)], last.result.finish)
    return Decision(result, last.error, draft, origins[:len(kept)])


def _origin(index: int, verdict: Verdict, draft: DraftTree) -> str:
    if index < len(verdict.path):
        return "accepted"
    is_leaf = verdict.rows[index] - 1 not in draft.parents
    return "bonus" if is_leaf and index else "corrected"


class _Scribe:
    """Collects the rows whose log-probabilities somebody asked for and computes them in one go."""

    def __init__(self, logits: torch.Tensor, processed: Processed) -> None:
        self._logits = logits
        self._processed = processed
        self._notes: list[tuple[Sequence, int, int, str, DraftTree | None]] = []

    def note(self, seq: Sequence, row: int, token: int, origin: str, draft: DraftTree | None) -> None:
        self._notes.append((seq, row, token, origin, draft))

    def write(self) -> None:
        if not self._notes:
            return
        tops = [seq.request.params.logprobs or 0 for seq, *_ in self._notes]
        scores = token_logprobs(self._logits, self._processed, [row for _, row, *_ in self._notes],
                                [token for _, _, token, *_ in self._notes], tops)
        for (seq, row, token, origin, draft), score in zip(self._notes, scores):
            emitter: Emitter = seq.emitter
            if emitter.logprobs is not None:
                emitter.logprobs.append(score)
            trace = seq.record.trace
            if trace is not None and seq.sample == 0:
                self._trace(trace, row, token, score, origin, draft)

    def _trace(self, trace: Trace, row: int, token: int, score: TokenLogprob, origin: str,
               draft: DraftTree | None) -> None:
        drafter = draft.drafter if draft is not None and origin == "accepted" else None
        trace.tokens.append(TraceToken(
            token=token, position=self._processed.rows[row].position, raw_logprob=score.raw,
            processed_logprob=score.processed, support=self._processed.support_size(row),
            processors=self._processed.processors(row), drafter=drafter, outcome=origin))
