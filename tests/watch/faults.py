"""Ten mistakes that real systems made, made on purpose in a running engine (METHODS: verification)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.tiny import tiny_engine, tiny_model
from paceline import LLM, SamplingParams
from paceline.engine.decide import decider
from paceline.engine.decide.randomness import inverse
from paceline.sampling.noise import ACCEPT, PRIVATE_DRAFT, scalar_bits
from paceline.speculation.drafter import Observation
from paceline.speculation.rules.verdict import Verdict, children_of, path_to
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES, Rule, multi_round
from paceline.watch.watch import DriftWatch
from speculation import bigrams
from speculation.bigrams import BigramDrafter, register, tables

SIZE = 12
Q = tables(SIZE, 9, 1.0)
CHAIN = (1, 1, 1)


@functools.cache
def small_model() -> Any:
    return tiny_model("llama", vocab_size=SIZE)


def watched_llm(action: str = "report", seed: int = 1, share: float = 1.0, **options: Any) -> LLM:
    """Around a tiny model, all its requests watched, with randomness that is the same every time."""
    llm = LLM.from_engine(tiny_engine(small_model(), **{"max_num_seqs": 64} | options))
    llm.watch = DriftWatch(llm.engine, share, action, seed=seed)
    return llm


def prompts(count: int, first: int = 0) -> list[list[int]]:
    return [[(seed * 5 + i * 7 + i * i) % SIZE for i in range(6)] for seed in range(first, first + count)]


def serve(llm: LLM, speculation: dict[str, Any], count: int, first: int = 0, **params: Any) -> None:
    """`count` requests of 40 tokens."""
    params = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True} | params
    llm.generate(prompts(count, first), [SamplingParams(seed=seed, **params) for seed in range(first, first + count)],
                 speculation=speculation)


def wish(rule: str, k: int = 3) -> dict[str, Any]:
    return {"method": "bigram", "verify": rule, "k": k, "adaptive": False}


# -------------------------------------------------------------------------------------------------- broken rules

class Bent:
    """A rule's randomness, less what a fault makes of it."""

    def __init__(self, base: Any, p: Any) -> None:
        self.base, self.p = base, p

    def accept(self, row: int, index: int) -> Any:
        return self.base.accept(row, index)

    def residual(self, row: int, weights: Any) -> int:
        return int(self.base.residual(row, weights))

    def target(self, row: int) -> int:
        return int(self.base.target(row))


def set_rule(patch: Any, name: str, verify: Callable[..., Verdict]) -> None:
    rule = RULES[name]
    patch.setitem(decider.RULES, name, Rule(name, verify, rule.reads_q, rule.chains_only))


def bend(patch: Any, name: str, kind: type[Bent]) -> None:
    sound = RULES[name].verify
    set_rule(patch, name, lambda tree, p, randomness: sound(tree, p, kind(randomness, p)))


def resample_from_p(patch: Any) -> dict[str, Any]:
    class FromTarget(Bent):
        def residual(self, row: int, weights: Any) -> int:
            return int(self.base.residual(row, self.p(row)))

    register(patch, BigramDrafter(Q, CHAIN))
    bend(patch, "rejection", FromTarget)
    return wish("rejection")


def longest_row_then_again(patch: Any) -> dict[str, Any]:
    def longest(tree: DraftTree, p: Any, randomness: Any) -> Verdict:
        children = children_of(tree)
        at = 0
        while (step := [c for c in children.get(at, ()) if tree.tokens[c - 1] == randomness.target(at)]):
            at = step[0]
        path = path_to(tree, at)
        again = randomness.residual(at, p(at))
        return Verdict([*(tree.tokens[row - 1] for row in path), again], [0, *path], path)

    class Guesses(BigramDrafter):
        """Two branches that nobody drew."""

        def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
            best = np.argsort(-self._q[text[-1]])
            return DraftTree([int(best[0]), int(best[1])], [-1, -1], self.name)

    register(patch, Guesses(Q))
    set_rule(patch, "multi-round", longest)
    return wish("multi-round", 1)


class Argmax(BigramDrafter):
    """Drafts by argmax and says that it drew."""

    def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
        q = self._q[text[-1]]
        return DraftTree([int(q.argmax())], [-1], self.name, q=[q])


def argmax_as_sample(patch: Any) -> dict[str, Any]:
    register(patch, Argmax(Q))
    return wish("rejection")


def argmax_at_the_root(patch: Any) -> dict[str, Any]:
    sound = RULES["rejection"].verify

    def sure(tree: DraftTree, p: Any, randomness: Any) -> Verdict:
        verdict, best = sound(tree, p, randomness), int(p(0).argmax())
        return verdict if verdict.tokens[0] == best else Verdict([best], [0], [])

    register(patch, BigramDrafter(Q, CHAIN))
    set_rule(patch, "rejection", sure)
    return wish("rejection")


def first_q(patch: Any) -> dict[str, Any]:
    """It shows where the drafter is surer than the target: what is left of its q is far from what it was."""
    sure = np.full((SIZE, SIZE), 0.05 / (SIZE - 2))
    for token in range(SIZE):
        sure[token, (token + 1) % SIZE], sure[token, (token + 5) % SIZE] = 0.9, 0.05
    register(patch, BigramDrafter(sure, (2, 1), replace=False))
    set_rule(patch, "without-replacement", multi_round)
    return wish("without-replacement", 2)


class Truncated(BigramDrafter):
    """Draws from the likelier half and declares the whole."""

    def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
        half = [np.where(row >= np.median(row), row, 0.0) for row in self._q]
        whole, self._q = self._q, [row / row.sum() for row in half]
        tree = super().tree(text, seed, depth)
        self._q = whole
        tree.q = [whole[tree.tokens[parent] if parent >= 0 else text[-1]] for parent in tree.parents]
        return tree


def drawn_from_less(patch: Any) -> dict[str, Any]:
    register(patch, Truncated(Q, CHAIN))
    return wish("rejection")


class Untruncated(BigramDrafter):
    """Draws from the whole and declares the likelier half."""

    def __init__(self, shape: tuple[int, ...], least: float) -> None:
        """`least`: what is declared for the others. Where it is 0 the engine sees what is wrong with a draft of one of
        them; a drafter that keeps its logarithms finite has more."""
        super().__init__(Q, shape)
        half = [np.where(row >= np.median(row), row, 0.0) for row in Q]
        self._declared = [np.maximum(row / row.sum(), least) for row in half]

    def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
        tree = super().tree(text, seed, depth)
        tree.q = [self._declared[tree.tokens[parent] if parent >= 0 else text[-1]] for parent in tree.parents]
        return tree


def drawn_from_more(patch: Any, least: float = 1e-300, shape: tuple[int, ...] = CHAIN) -> dict[str, Any]:
    register(patch, Untruncated(shape, least))
    return wish("rejection")


class Choosy(BigramDrafter):
    """Looks at what it drew and leaves it out where it is unlikely."""

    def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
        tree = super().tree(text, seed, depth)
        q = self._q[text[-1]]
        return tree if q[tree.tokens[0]] >= np.median(q) else DraftTree([], [], self.name)


def looked_at_and_left_out(patch: Any) -> dict[str, Any]:
    register(patch, Choosy(Q, (1,)))
    return wish("rejection", 1)


def shared_uniforms(patch: Any) -> dict[str, Any]:
    register(patch, BigramDrafter(Q, CHAIN))
    patch.setattr(bigrams, "PRIVATE_DRAFT", ACCEPT)
    return wish("rejection")


class Leaning(BigramDrafter):
    """After a rejection it leans towards what it had drafted at the position, and says so in its q: sound, as long as
    every cycle draws anew."""

    fresh = False

    def begin(self, sequence: DraftedSequence) -> None:
        self._before: dict[tuple[int, int], int] = getattr(self, "_before", {})

    def tree(self, text: list[int], seed: int, depth: int) -> DraftTree:
        tokens: list[int] = []
        declared: list[np.ndarray] = []
        for below in range(min(depth, 3)):
            position = len(text) + below
            q = np.array(self._q[tokens[-1] if tokens else text[-1]])
            before = self._before.get((seed, position))
            if before is not None:
                q = 0.5 * q + 0.5 * np.eye(SIZE)[before]
            bits = scalar_bits(seed, position, 0, PRIVATE_DRAFT, cycle=len(text) if self.fresh else 0)
            tokens.append(inverse((bits + 0.5) * 2.0**-32, q))
            declared.append(q)
        for below, token in enumerate(tokens):
            self._before[seed, len(text) + below] = token
        tree = DraftTree.chain(tokens, self.name)
        tree.q = declared
        return tree

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass


def the_same_noise_again(patch: Any) -> dict[str, Any]:
    register(patch, Leaning(Q))
    return wish("rejection")


def u_may_be_zero(patch: Any) -> dict[str, Any]:
    class Lenient(float):
        __lt__ = float.__le__

    class Zero(Bent):
        def accept(self, row: int, index: int) -> Any:
            return Lenient(0.0)

    register(patch, BigramDrafter(Q, CHAIN))
    bend(patch, "rejection", Zero)
    return wish("rejection")


def taken_unseen(patch: Any) -> dict[str, Any]:
    """Under the coupled rule: the first draft of every fourth verification is accepted, whatever the target chose."""
    sound, calls = decider.coupled, iter(range(10**9))

    def credulous(parents: Any, tokens: Any, chosen: Any) -> Verdict:
        if next(calls) % 4 == 3:
            chosen = [tokens[1], *chosen[1:]]
        return sound(parents, tokens, chosen)

    register(patch, BigramDrafter(Q, CHAIN))
    patch.setattr(decider, "coupled", credulous)
    return wish("coupled")


def tokens_until_alarm(llm: LLM, speculation: dict[str, Any], most: int, **params: Any) -> int | None:
    """Requests of 40 tokens, 16 at a time, until something is raised: how many tokens of text that took. No shadow is
    run: what is found is found in the verify steps. None: `most` tokens were not enough."""
    engine, watch, first = llm.engine, llm.watch, 0
    assert watch is not None
    params = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True} | params
    while engine.metrics.output_tokens < most:
        for seed, prompt in enumerate(prompts(16, first), first):
            engine.add(prompt, SamplingParams(seed=seed, **params), speculation=speculation)
        first += 16
        while engine.has_work:
            engine.step()
            watch._waiting.clear()
            watch.attend()
            if watch.alarms:
                return engine.metrics.output_tokens
    return None
