"""Decide: from a step's logits to each sequence's new tokens, through one pipeline for plain rows and drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import cache

import torch

from paceline.engine.decide.decision import BONUS, CORRECTED, PLAIN, Decision
from paceline.engine.decide.randomness import KeyedRandomness
from paceline.engine.decide.recording import recorded
from paceline.engine.decide.sampled import Sampled
from paceline.engine.records.emitter import Emitter
from paceline.engine.records.record import Record
from paceline.engine.records.witness import Verified
from paceline.engine.rows.batch import StepLogits
from paceline.engine.rows.sample_rows import SampleRows, first_drafted
from paceline.engine.schedule.sequence import Search, Sequence, Status
from paceline.engine.schedule.step import RowGroup, Step
from paceline.errors import PacelineError
from paceline.kernels.device.columns import NAN
from paceline.request import TokenLogprob
from paceline.sampling.logprobs import prompt_logprobs, token_logprobs, unpacked
from paceline.sampling.pipeline import Pipeline, Processed, no_token
from paceline.sampling.trace import Trace, TraceToken
from paceline.speculation.stats import Provenance, Round
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES, Probs, Target, Verdict, coupled


class Decider:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.tap: Callable[[torch.Tensor, SampleRows], None] | None = None
        """Shown the raw logits [R, V] of the rows that are sampled, to measure; it changes nothing."""

    def decide(self, step: Step, out: StepLogits) -> list[Decision]:
        """One decision per group, in order; empty for groups that sample nothing or whose sequence is gone."""
        found: list[int | Decision] = []
        """Per group: its first row of the pipeline, or what is decided without one."""
        if out.hidden:
            _pool(step.groups, out.hidden)
        rows = SampleRows()
        wanted: list[int] = []
        for group, first in zip(step.groups, out.first):
            seq = group.seq
            early = self._without_sample(group, first, out.logits)
            if early is not None:
                found.append(early)
                continue
            last = first + len(group.tokens) - group.logits_from - 1
            if seq.search is not None:
                found.append(_search(seq.search, group, out.logits[last]))
                continue
            found.append(len(rows))
            if group.draft is None:
                position = group.start + len(group.tokens)
                rows.add(seq.state, position)
                wanted.append(last)
                for sibling in group.siblings:
                    rows.add(sibling.state, position)
                    wanted.append(last)
            else:
                rows.add_draft(group)
                wanted.extend(range(last - len(group.draft), last + 1))
        if not rows:
            return [one for one in found if isinstance(one, Decision)]
        logits = out.logits
        if wanted != list(range(logits.shape[0])):
            logits = logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]
        if self.tap is not None:
            self.tap(logits, rows)
        processed = self._pipeline.process(logits, rows)
        processed.errors.update(rows.errors)
        chosen = self._pipeline.choose(processed)
        scribe = _Scribe(logits, processed)
        decisions = [_settle(group, one, chosen, processed, scribe) if isinstance(one, int) else one
                     for group, one in zip(step.groups, found)]
        scribe.write()
        if out.hidden:
            _hand_out(step.groups, decisions, out.hidden)
        return decisions

    def decide_sampled(self, step: Step, sampled: Seq[Sampled]) -> list[Decision]:
        """What a step yielded whose tokens the device sampled: per group one after the other, or none."""
        return [_emit_sampled(group.seq, own) if own.verdict is None else _emit_verified(group, own, own.verdict)
                for group, own in zip(step.groups, sampled, strict=True)]

    def _without_sample(self, group: RowGroup, first: int, logits: torch.Tensor) -> Decision | None:
        """What can be said of a group without sampling; None: it wants a token."""
        request = group.seq.request
        if first < 0 or group.seq.status is Status.FINISHED:
            return Decision([])
        if request.params.prompt_logprobs is not None:
            try:
                _score_prompt(group, logits, first, group.seq.record)
            except PacelineError as problem:
                return _ended(group, "error", problem)
        drafted = 0 if group.draft is None else len(group.draft)
        if group.start + len(group.tokens) - drafted < len(group.seq.tokens):
            return Decision([])  # a chunk that does not reach the end of what is known
        return _ended(group, "length") if request.max_tokens == 0 else None


def _ended(group: RowGroup, reason: str, error: PacelineError | None = None) -> Decision:
    """A group that ends without a token, its further samples with it."""
    return Decision([], finish=reason, error=error, siblings=[Decision([], finish=reason) for _ in group.siblings])


def _search(search: Search, group: RowGroup, logits: torch.Tensor) -> Decision:
    """What a beam's logits decide, for it and its peers."""
    try:
        branches = search.offer(group.seq, logits)
        return Decision([], waits=not branches, branches=branches)
    except PacelineError as problem:
        return Decision([], error=problem, branches=search.end("error"))


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


def _pool(groups: Seq[RowGroup], hidden: Mapping[int, torch.Tensor]) -> None:
    """To the embeddings that are asked for: the hidden states of their prompts' rows."""
    offset = 0
    for group in groups:
        pooling, end = group.seq.record.pooling, offset + len(group.tokens)
        if pooling is not None and group.seq.status is not Status.FINISHED:
            pooling.take(hidden[pooling.tap][offset:end], group.start)
        offset = end


def _hand_out(groups: Seq[RowGroup], decisions: Seq[Decision], hidden: Mapping[int, torch.Tensor]) -> None:
    """To those whose drafters read them: the hidden states of the rows that stand."""
    offset = 0
    for group, decision in zip(groups, decisions):
        if group.seq.taps and decision.tokens:
            rows = range(len(group.tokens)) if group.draft is None else [0, *decision.path]
            index = torch.tensor([offset + row for row in rows], dtype=torch.int64)
            decision.hidden = {tap: hidden[tap].index_select(0, index.to(hidden[tap].device)) for tap in group.seq.taps}
        offset += len(group.tokens)


def _settle(group: RowGroup, first: int, chosen: list[int], processed: Processed, scribe: _Scribe) -> Decision:
    if group.draft is None:
        decision = _emit_one(group.seq, chosen[first], first, processed, scribe)
        if group.siblings:
            decision.siblings = [_emit_one(sibling, chosen[row], row, processed, scribe)
                                 for row, sibling in enumerate(group.siblings, first + 1)]
        return decision
    draft = group.draft
    own = chosen[first:first + len(draft) + 1]
    rule, target = group.seq.rule, _target(first, processed)
    if rule == "coupled":
        tokens = [group.seq.tokens[-1], *draft.tokens]
        parents = [-1, *(parent + 1 for parent in draft.parents)]
        verdict = coupled(parents, tokens, own)
    else:
        verdict = _verdict(rule, group, draft, first, own, processed, target)
    trace: Trace | None = group.seq.record.trace
    if trace is not None and trace.cut is None and group.seq.sample == 0:
        trace.add_cycle(recorded(draft, verdict, first_drafted(group), rule))
    if group.seq.record.witness is not None:
        group.seq.record.witness.verified(Verified(
            group.seq.sample, draft, verdict, processed.rows[first].position, target,
            lambda row, token, top: scribe.score(first + row, token, top)))
    decision = _emit_path(group.seq, verdict, first, draft, processed, scribe)
    if rule == "coupled":
        decision.chosen = own
    return decision


def _target(first: int, processed: Processed) -> Target:
    """The distributions after the rows of the draft whose first one this is, each made once."""

    @cache
    def target(row: int) -> Probs | None:
        at = first + row
        return None if at in processed.errors or at in processed.stopped else processed.probs(at)

    return target


def _verdict(rule: str, group: RowGroup, draft: DraftTree, first: int, chosen: list[int],
             processed: Processed, target: Target) -> Verdict:
    """What a rule other than the coupled one makes of a draft, on keyed randomness of its own."""
    randomness = KeyedRandomness(group.seq.seed, first_drafted(group),
                                 lambda row: processed.rows[first + row].position, chosen)
    wish = group.seq.request.speculation
    return RULES[rule].verify(draft, target, randomness, **({} if wish is None else wish.numbers))


def _emit_one(seq: Sequence, token: int, row: int, processed: Processed, scribe: _Scribe,
              origin: Provenance = PLAIN) -> Decision:
    """Hand one token to the sequence's text; the steady state of plain decoding, so kept lean."""
    if processed.errors and row in processed.errors:
        return Decision([], finish="error", error=processed.errors[row])
    if processed.stopped and row in processed.stopped:
        return Decision([], finish="stop")
    emitter: Emitter = seq.emitter
    if emitter.scored:
        scribe.note(seq, row, token, origin)
    try:
        return Decision([token], (), emitter.push(token))
    except PacelineError as problem:
        return Decision([token], finish="error", error=problem)


def _emit_sampled(seq: Sequence, sampled: Sampled) -> Decision:
    """Hand what the device sampled to the sequence's text, until it ends or there is no token to go on with."""
    tokens = sampled.tokens
    if seq.status is Status.FINISHED or not tokens:
        return Decision([])
    end: str | None = None
    error: PacelineError | None = None
    if min(tokens) < 0:
        at = next(at for at, token in enumerate(tokens) if token < 0)
        error = no_token(seq.state, len(seq.tokens) + at, not_a_number=tokens[at] == NAN)
        end, tokens = "stop" if error is None else "error", tokens[:at]
    emitter: Emitter = seq.emitter
    known = len(emitter.token_ids)
    try:
        taken, finish = emitter.push_all(tokens)
    except PacelineError as problem:
        taken, finish, end, error = len(emitter.token_ids) - known, None, "error", problem
    tokens = tokens[:taken]
    if sampled.scores is not None and emitter.scored:
        top = seq.request.params.logprobs or 0
        for token, row in zip(tokens, sampled.scores):
            emitter.note(unpacked(row, token, top))
    if finish is not None:
        end, error = finish, None
    origins: Seq[Provenance] = (PLAIN,) * taken
    if sampled.rounds and seq.record.speculation is not None:
        origins = _origins(sampled.rounds, seq.record.speculation.method, taken)
    return Decision(tokens, range(1, taken), end, error=error, origins=origins, rounds=_cut(sampled.rounds, taken))


def _cut(rounds: Seq[Round], taken: int) -> Seq[Round]:
    """Those that the first `taken` tokens come from; of the last perhaps a part."""
    left = taken
    for index, one in enumerate(rounds):
        if left <= one.accepted:  # nothing is left of it, or not all
            return [*rounds[:index], one._replace(accepted=left)] if left > 0 else rounds[:index]
        left -= one.accepted + 1
    return rounds


def _origins(rounds: Seq[Round], method: str, taken: int) -> list[Provenance]:
    found: list[Provenance] = []
    right = Provenance("accepted", method)
    for drafted, accepted, _ in rounds:
        if accepted:
            found += [right] * accepted
        found.append(PLAIN if not drafted else BONUS if accepted == drafted else CORRECTED)
    return found[:taken]


def _emit_verified(group: RowGroup, sampled: Sampled, verdict: Verdict) -> Decision:
    """The same for what the device sampled and verified."""
    one, draft = _emit_sampled(group.seq, sampled), group.draft
    if draft is None or group.seq.status is Status.FINISHED:
        return one
    count = len(one.tokens)
    return Decision(one.tokens, verdict.path[:count], one.finish, error=one.error, draft=draft,
                    chosen=list(sampled.chosen), moved=True,
                    origins=[_origin(index, verdict, draft) for index in range(count)])


def _emit_path(seq: Sequence, verdict: Verdict, first: int, draft: DraftTree, processed: Processed,
               scribe: _Scribe) -> Decision:
    """Hand a verdict's tokens to the sequence's text one by one, until it ends."""
    decision = Decision([], draft=draft, overlaps=verdict.overlaps)
    origins: list[Provenance] = []
    for index, (token, row) in enumerate(zip(verdict.tokens, verdict.rows)):
        origins.append(_origin(index, verdict, draft))
        one = _emit_one(seq, token, first + row, processed, scribe, origins[-1])
        decision.tokens += one.tokens
        decision.finish, decision.error = one.finish, one.error
        if one.finish is not None:
            break
    decision.path = verdict.path[:len(decision.tokens)]
    decision.origins = origins[:len(decision.tokens)]
    return decision


def _origin(index: int, verdict: Verdict, draft: DraftTree) -> Provenance:
    if index < len(verdict.path):
        return Provenance("accepted", draft.source(verdict.path[index] - 1))
    return BONUS if verdict.bonus else CORRECTED


class _Scribe:
    """Collects the rows whose log-probabilities somebody asked for and computes them in one go."""

    def __init__(self, logits: torch.Tensor, processed: Processed) -> None:
        self._logits = logits
        self._processed = processed
        self._notes: list[tuple[Sequence, int, int, Provenance]] = []

    def score(self, row: int, token: int, top: int) -> TokenLogprob:
        """Of one token, now."""
        return token_logprobs(self._logits, self._processed, [row], [token], [top])[0]

    def note(self, seq: Sequence, row: int, token: int, origin: Provenance) -> None:
        self._notes.append((seq, row, token, origin))

    def write(self) -> None:
        if not self._notes:
            return
        tops = [seq.request.params.logprobs or 0 for seq, *_ in self._notes]
        scores = token_logprobs(self._logits, self._processed, [row for _, row, *_ in self._notes],
                                [token for _, _, token, *_ in self._notes], tops)
        for (seq, row, token, origin), score in zip(self._notes, scores):
            emitter: Emitter = seq.emitter
            emitter.note(score)
            trace = seq.record.trace
            if trace is not None and seq.sample == 0:
                self._trace(trace, row, token, score, origin)

    def _trace(self, trace: Trace, row: int, token: int, score: TokenLogprob, origin: Provenance) -> None:
        trace.tokens.append(TraceToken(
            token=token, position=self._processed.rows[row].position, raw_logprob=score.raw,
            processed_logprob=score.processed, support=self._processed.support_size(row),
            processors=self._processed.processors(row), drafter=origin.drafter, outcome=origin.outcome))
