"""BeamSearch: several sequences of one request whose next tokens are decided together, by the likeliest whole texts.

The rules are those of transformers' beam search. Every beam's best continuations are ranked by the sum of their raw
log-probabilities, ties to the better beam and then to the lower token id. Of the best `beam_width` those that end (a
stop token, or the length) become hypotheses, scored by sum / length ** length_penalty; the best that do not end are the
next beams. `early_stopping` says when more steps cannot help: True, as soon as there are beam_width hypotheses; False,
when the best beam, scored at its present length, is below the worst of them; "never", when it would be so even at the
length that suits it best.

Beams need not run in one step: what a beam offers is kept until all its peers have offered, also if it loses its blocks
meanwhile. Then each continuation stays in the sequence of its beam or, where a beam has several, moves into one whose
beam has none, sharing blocks by copy-on-write.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paceline.engine.records.emitter import Emitter
from paceline.engine.schedule.sequence import Branch, Sequence
from paceline.errors import EmptySupportError
from paceline.request import TokenLogprob
from paceline.sampling.logprobs import best_tokens


@dataclass(slots=True, eq=False)
class Beam:
    """A text that goes on: the tokens of its sequence."""

    seq: Sequence
    total: float = 0.0
    """Sum of its output's log-probabilities."""
    steps: list[TokenLogprob] = field(default_factory=list)
    """How each token of the output was scored."""
    options: list[TokenLogprob] | None = None
    """The best that can follow; None until its logits have come."""


class BeamExtension(NamedTuple):
    """A beam and what may follow it."""

    total: float
    beam: Beam
    last: TokenLogprob


@dataclass(slots=True)
class Hypothesis:
    """A text that has ended."""

    score: float
    total: float
    steps: list[TokenLogprob]


class BeamSearch:
    """One request's. Begins with one beam, sample 0, whose peers have no text yet; owned by the engine's thread."""

    def __init__(self, sequences: Seq[Sequence]) -> None:
        first = sequences[0]
        params = first.request.params
        self._sequences = list(sequences)
        self._beams = [Beam(first)]
        self._hypotheses: list[Hypothesis] = []
        """At most beam_width, best first; of equals the older one."""
        self._width = params.beam_width
        self._penalty = params.length_penalty
        self._early = params.early_stopping
        self._stops = frozenset(first.state.early_stops)
        self._top = params.logprobs

    def offer(self, seq: Sequence, logits: Tensor) -> list[Branch]:
        """The logits [V] after a sequence's last token. When those of all beams have come: what everyone does next."""
        for beam in self._beams:
            if beam.seq is seq:
                beam.options = self._continuations(seq, logits)
        complete = self._beams and all(beam.options is not None for beam in self._beams)
        return self._advance() if complete else []

    def end(self, reason: str, last: Seq[int] = ()) -> list[Branch]:
        """The search is over; what is still offered to it is dropped. `last`: tokens decided in its last step, of which
        each sequence gets one."""
        self._beams = []
        return [Branch(seq, seq, list(last[place:place + 1]), reason) for place, seq in enumerate(self._sequences)]

    def _continuations(self, seq: Sequence, logits: Tensor) -> list[TokenLogprob]:
        """As many as could possibly be kept: if all tokens that end a text came first, still one for every beam."""
        options = best_tokens(logits, self._width + len(self._stops), self._top)
        if seq.output_len < seq.request.params.min_tokens:  # not by its state: one that rested has none of its own
            options = [option for option in options if option.token not in self._stops]
        return options

    def _advance(self) -> list[Branch]:
        length = self._beams[0].seq.output_len + 1
        most = self._beams[0].seq.limit - self._beams[0].seq.prompt_len
        # Sorting is stable: equals stay in the order of beams, and those of one beam in the order of token ids.
        ranked = sorted((BeamExtension(beam.total + option.raw, beam, option)
                         for beam in self._beams for option in beam.options or ()),
                        key=lambda extension: -extension.total)
        for place in ranked[:self._width]:
            if length >= most or place.last.token in self._stops:
                self._keep(Hypothesis(place.total / float(length) ** self._penalty, place.total,
                                      [*place.beam.steps, place.last]))
        going = [] if length >= most else [place for place in ranked if place.last.token not in self._stops]
        if not going or self._settled(going[0].total, length, most):
            return self._finish([place.last.token for place in ranked])
        return self._branch(going[:len(self._sequences)])

    def _keep(self, hypothesis: Hypothesis) -> None:
        self._hypotheses.append(hypothesis)
        self._hypotheses.sort(key=lambda one: -one.score)
        del self._hypotheses[self._width:]

    def _settled(self, best: float, length: int, most: int) -> bool:
        """Whether the search may end, though there are beams, the best of them with this total."""
        if len(self._hypotheses) < self._width:
            return False
        if self._early is True:
            return True
        longest = most if self._early == "never" and self._penalty > 0.0 else length
        return bool(best / float(longest) ** self._penalty <= self._hypotheses[-1].score)

    def _branch(self, going: list[BeamExtension]) -> list[Branch]:
        """Hand out the sequences: a beam's best continuation stays in its own, the others take those left over. Where
        the vocabulary is too small to fill all beams some rest."""
        owners = {place.beam.seq for place in going}
        left = [seq for seq in self._sequences if seq not in owners]
        branches: list[Branch] = []
        beams: list[Beam] = []
        for total, beam, last in going:
            source = beam.seq
            stays = source in owners
            owners.discard(source)
            seq = source if stays else left.pop(0)
            beams.append(Beam(seq, total, [*beam.steps, last]))
            branches.append(Branch(seq, source, [last.token]))
        self._beams = beams
        return branches + [Branch(seq, seq, []) for seq in left]

    def _finish(self, last: list[int]) -> list[Branch]:
        if not self._hypotheses:
            raise EmptySupportError("The model leaves no token possible after any beam; check the weights and the data "
                                    "type it runs in.")
        emitters: list[Emitter] = self._sequences[0].record.emitters
        for hypothesis, emitter in zip(self._hypotheses, emitters):
            emitter.push_all([step.token for step in hypothesis.steps])
            for step in hypothesis.steps:
                emitter.note(step)
            emitter.score = hypothesis.score
        return self.end(emitters[0].finish_reason or "stop", last)
