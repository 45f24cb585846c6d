"""What is remembered of a grammar never changes what it says, and is remembered within bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.structured import PADDED, PROMPT, compiled, random_text, structured_llm, token, tokenizer
from paceline import SamplingParams
from paceline.bench.schemas import SCHEMAS
from paceline.grammar import states
from paceline.grammar.sequence import SequenceGrammar

END = sorted(tokenizer().eos_ids)[0]


def sequence(grammar: Any) -> SequenceGrammar:
    return SequenceGrammar(grammar, PADDED, [END])


def by_hand(grammar: Any, tokens: list[int]) -> np.ndarray | None:
    """The mask after `tokens` from a matcher that has seen nothing else."""
    matcher = grammar.matcher()
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return None
    size = len(tokenizer().table.tokens)
    mask = np.zeros(PADDED, dtype=bool)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    mask[:size] = bits[:size]
    mask[END] = matcher.is_accepting()
    return mask


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["person", "any_of_objects", "optional", "matrix", "escaped_keys"]), st.integers(0, 1000))
def test_a_text_that_goes_on_elsewhere_is_not_masked_token_by_token(name: str, seed: int) -> None:
    """An engine that takes it over would have everybody wait for that. From there on nothing is different."""
    grammar = compiled(json_schema=SCHEMAS[name])
    whole = sequence(grammar)
    random_text(whole, seed, most=60)
    tokens = list(whole._output)
    for cut in {0, len(tokens) // 3, len(tokens)}:
        grammar.forget()
        begun = sequence(grammar)
        begun.resume(tokens[:cut])
        for at in range(cut, len(tokens) + 1):
            want, got = by_hand(grammar, tokens[:at]), begun.mask(())
            assert want is not None and got is not None and np.array_equal(want, got)
            begun.append(tokens[at:at + 1])
        assert grammar.states <= 2 + len(tokens) - cut
        assert begun.closed(tokens) == whole.closed(tokens)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["person", "any_of_objects", "optional", "matrix", "escaped_keys"]), st.data())
def test_any_walk_gives_the_masks_of_a_fresh_matcher(name: str, data: st.DataObject) -> None:
    """Drafts that stand, drafts that fall, drafts the grammar forbids, in any order."""
    grammar = compiled(json_schema=SCHEMAS[name])
    walk, output = sequence(grammar), list[int]()
    luck = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(12):
        path: list[int] = []
        for _ in range(int(luck.integers(0, 5))):
            mask = by_hand(grammar, output + path)
            free = luck.random() < 0.15 or mask is None
            choices = np.arange(PADDED) if free else np.flatnonzero(mask & (np.arange(PADDED) != END))
            if not len(choices):
                break
            path.append(int(luck.choice(choices)))
        want, got = by_hand(grammar, output + path), walk.mask(path)
        assert (want is None) == (got is None)
        assert want is None or np.array_equal(want, got)
        taken = path[:int(luck.integers(0, len(path) + 1))]
        if by_hand(grammar, output + taken) is not None:
            walk.append(taken)
            output += taken


def test_a_state_is_computed_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request for the same text asks the library nothing."""
    llm = structured_llm()
    params = SamplingParams(json_schema=SCHEMAS["person"], seed=3, max_tokens=400)
    first = llm.generate([PROMPT], params)[0]
    read: list[int] = []
    original = states.CompiledGrammar.read

    def counting(self: Any, matcher: Any) -> Any:
        read.append(1)
        return original(self, matcher)

    monkeypatch.setattr(states.CompiledGrammar, "read", counting)
    again = llm.generate([PROMPT], params, speculation={"method": "oracle", "tokens": first.outputs[0].token_ids})[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert not read
    other = llm.generate([PROMPT], SamplingParams(json_schema=SCHEMAS["person"], seed=4, max_tokens=400))[0]
    assert other.error is None and 0 < len(read) < len(other.outputs[0].token_ids) + 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiled(regex="[a-z]{40}")
    monkeypatch.setattr(states, "MOST_STATES", 50)
    for seed in range(20):
        text, _ = random_text(sequence(grammar), seed)
        assert len(text) == 40 and text.islower()
        assert grammar.states <= 50 + 41
    assert grammar.states > 1


def test_forced_text_is_offered_in_the_tokenizers_own_tokens() -> None:
    grammar = sequence(compiled(regex='x"name": (yes|no)'))
    grammar.append([token("x")])
    forced = list(grammar.forced())
    assert forced
    assert '"name": '.startswith(tokenizer().decode(forced))
    assert tokenizer().encode('"name": yes', add_special=False)[:len(forced)] == forced
    assert sequence(compiled(regex="[ab]")).forced() == ()


def test_special_tokens_and_ids_without_a_token_never_come() -> None:
    """Not even where any text may."""
    mask = sequence(compiled(regex="(?s:.)*")).mask(())
    assert mask is not None
    allowed = set(np.flatnonzero(mask).tolist())
    assert allowed & tokenizer().special_ids == {END}
    assert max(allowed) < len(tokenizer().table.tokens) < PADDED
    strict = sequence(compiled(regex="(?s:.)+")).mask(())
    assert strict is not None and not strict[END]


def test_a_special_token_spelled_out_is_just_text() -> None:
    """<|end|> as text may come, in other tokens than the one that ends a text."""
    grammar, output = sequence(compiled(choice=["<|end|>"])), list[int]()
    assert END not in grammar.forced()
    while not grammar.closed(output):
        mask = grammar.mask(())
        assert mask is not None and not mask[END]
        output.append(int(np.flatnonzero(mask)[0]))
        grammar.append(output[-1:])
    assert tokenizer().decode(output, skip_special=False) == "<|end|>" and END not in output
    only_end = grammar.mask(())
    assert only_end is not None and np.flatnonzero(only_end).tolist() == [END]
