"""Drafters of the host's that read hidden states of the target get those of every token that stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.tiny import VOCAB, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.errors import RequestError
from paceline.kernels import cpu
from paceline.models.forward import Forward
from paceline.speculation import spec
from paceline.speculation.drafter import Needs
from paceline.speculation.tree import DraftTree
from speculation.model_drafting import target

PROMPT = [(i * 31 + 7) % VOCAB for i in range(40)]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.0)
NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")


class Reader:
    """Proposes the text that it was told, with a wrong sibling first at each depth, and keeps what it is shown."""

    name = "reader"

    def __init__(self, taps: tuple[int, ...], text: list[int]) -> None:
        self.needs = Needs(taps=taps)
        self._text = text
        self.seen: list[tuple[int, dict[int, torch.Tensor]]] = []
        """How many tokens were known, and what was shown."""

    def begin(self, sequence: Any) -> None:
        pass

    def propose(self, sequences: Any, budgets: Any) -> list[DraftTree | None]:
        return [self._draft(self._text[len(sequence.tokens):][:2]) for sequence in sequences]

    def _draft(self, right: list[int]) -> DraftTree | None:
        tokens: list[int] = []
        parents: list[int] = []
        for depth, token in enumerate(right):
            above = 2 * depth - 1 if depth else -1
            tokens += [(token + 1) % VOCAB, token]
            parents += [above, above]
        return DraftTree(tokens, parents, self.name) if tokens else None

    def observe(self, sequence: Any, observation: Any) -> None:
        self.seen.append((len(sequence.tokens), dict(observation.hidden)))

    def release(self, sequence: Any) -> None:
        pass


def hidden_of(llm: Any, text: list[int], taps: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """All of a text in one pass."""
    found: dict[int, torch.Tensor] = {}
    model, forward = llm.engine.model, type(llm.engine.model).forward

    def spied(tokens: torch.Tensor, context: Forward) -> torch.Tensor:
        context.taps = frozenset(taps)
        out = forward(model, tokens, context)
        found.update({tap: context.tapped[tap].clone() for tap in taps})
        return out

    model.forward = spied
    try:
        llm.generate([text], SamplingParams(max_tokens=1, temperature=0.0), speculation=None)
    finally:
        del model.forward
    return found


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("kind", ["reference", "stepped", pytest.param("native", marks=NATIVE)])
def test_hidden_states_are_those_of_the_tokens_that_stand(kind: str, chunk: int | None,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    model = target("native") if kind == "native" else tiny_model()
    layers = model.config.num_layers
    taps = (0, 2, layers)
    more = {} if kind == "native" else {"kernels": kind}
    # The reference has the bits of both that run in torch.
    plain = tiny_llm(model, enable_prefix_caching=False, **({} if kind == "native" else {"kernels": "reference"}))
    text = PROMPT + plain.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    expected = hidden_of(plain, text, taps)
    reader = Reader(taps, text)
    monkeypatch.setattr(spec, "BUILDERS", {**spec.BUILDERS, "reader": lambda *given: reader})
    llm = tiny_llm(model, max_prefill_chunk=chunk, **more)
    wishes = [{"method": "reader", "adaptive": False}, None]
    outs = llm.generate([PROMPT, PROMPT[::-1]], [GREEDY, GREEDY], speculation=wishes)
    assert outs[0].speculation is not None and outs[0].speculation.failure is None
    assert PROMPT + outs[0].outputs[0].token_ids == text
    assert reader.seen[0][0] == len(PROMPT) + 1 and len(reader.seen[0][1][0]) == (40 if chunk is None else 8)
    assert [len(hidden[0]) for _, hidden in reader.seen[1:]] == [3, 3, 3, 3, 1]
    for known, hidden in reader.seen:
        assert set(hidden) == set(taps)
        for tap in taps:
            assert torch.equal(hidden[tap], expected[tap][known - 1 - len(hidden[tap]):known - 1])


def test_a_drafter_that_reads_layers_which_are_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "BUILDERS", {**spec.BUILDERS, "reader": lambda *given: Reader((1, 9), [])})
    with pytest.raises(RequestError, match=r"layers 1, 9, and the model has 3"):
        tiny_llm().generate([PROMPT], GREEDY, speculation="reader")
