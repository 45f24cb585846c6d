"""Drafts for the rules that read q: what a draft says it was drawn from is the drafting model's distribution after
every control, worked out here from its weights alone, and the drafted tokens are drawn from it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from harness import Hand, Rows, Sequence
from slow_pipeline import edited, support

from engine.tiny import BASE, SHAPES, VOCAB, RandomWeights
from paceline import SamplingParams
from paceline.kernels import cpu
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.config import ModelConfig
from paceline.models.native import NativeDecoder
from paceline.models.reduced import LowBitWeights
from paceline.models.registry import build
from pairwise import each
from speculation.model_drafting import PROMPT, WIDE, OtherWeights, Watch, drafting_llm
from speculation.statistics import chi_square

RULES = ("rejection", "multi-round", "without-replacement")
OTHER = {"method": "draft", "model": "other"}
WISHES: dict[str, dict[str, Any]] = {
    "draft": OTHER,
    "skip": {"method": "skip", "skip": [1]},
    "exit": {"method": "exit", "layers": 2},
    "precision": {"method": "precision", "bits": 4},
    "cascade": {"method": "cascade", "drafter": "exit", "by": OTHER, "small_k": 2},
    "cascade on one cache": {"method": "cascade", "drafter": "ngram", "by": {"method": "skip", "skip": [1]}},
}
IN_TORCH = (("multi-round", "draft"),)
LATER = set(zip(RULES * 2, WISHES))
"""Native kernels take less time: on them every run meets every method with all rules but one."""
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1.6, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": -0.6},
    {"temperature": 1.0, "logit_bias": {5: 3.5, 9: -4.0, 40: 2.0}},
    {"temperature": 1.2, "no_repeat_ngram_size": 2, "allowed_token_ids": tuple(range(0, VOCAB, 3))},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2,
     "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {5: 1.5, 9: -2.0}, "no_repeat_ngram_size": 3},
]
NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here")


class Silenced(RandomWeights):
    """The target's weights, a layer's two output projections zero: it adds nothing, which is to be skipped."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._silent = tuple(f"model.layers.{layer}.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj"))

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = super().take(name, shape, dtype)
        return torch.zeros_like(tensor) if name in self._silent else tensor


@functools.cache
def alone(method: str, kind: str) -> tuple[Any, Any]:
    """The target, or a drafting model made anew from weights, as if there were no other; and its kernels."""
    weights: Any = {"draft": OtherWeights(), "skip": Silenced(1), "cascade": OtherWeights(),
                    "cascade on one cache": Silenced(1),
                    "precision": LowBitWeights(RandomWeights(), 4)}.get(method) or RandomWeights()
    layers = {"num_hidden_layers": 2} if method == "exit" else {}
    shape = ModelConfig.from_dict(BASE | WIDE | SHAPES["llama"] | layers)
    if kind == "native":
        return NativeDecoder(shape, weights, 512, threads=1), NativeKernels()
    return build(shape, weights, 512), ReferenceKernels()


class Reader:
    """Reads a text by hand, without an engine: `before` all but its end, whose keys and values `model` then goes on
    from. A draft model of its own is both."""

    def __init__(self, before: tuple[Any, Any], model: tuple[Any, Any]) -> None:
        self._before, self._model = before, model
        self._hand = Hand(*before, blocks=400)
        self._texts: dict[int, Sequence] = {}

    def logits(self, request: int, text: list[int], path: list[int]) -> np.ndarray:
        """[V] after `text` and `path`; `before` has read the text but for its last token, `model` the rest. The texts
        of a request each begin with the one before."""
        seq = self._texts.setdefault(request, self._hand.new())
        self._step(self._before, seq, text[len(seq.tokens):-1])
        logits = self._step(self._model, seq, [text[-1], *path])
        seq.tokens = text[:-1]
        return logits[-1].numpy()

    def _step(self, model: tuple[Any, Any], seq: Sequence, tokens: list[int]) -> torch.Tensor:
        self._hand.model, self._hand.kernels = model
        return self._hand.step([Rows(seq, tokens)])[0] if tokens else torch.empty(0)


def distribution(logits: np.ndarray, params: SamplingParams, output: list[int]) -> np.ndarray:
    """[V] float64, by the slow pipeline."""
    scores = support(edited(logits, params, PROMPT, output, eos=[], bad_words=[]), params)
    best = max(scores.values())
    probs = np.zeros(VOCAB)
    for token, score in scores.items():
        probs[token] = np.exp(float(score) - float(best))
    return probs / probs.sum()


@pytest.mark.parametrize("kind, rule, method", [
    *(pytest.param("llama", rule, method, marks=() if (rule, method) in IN_TORCH else pytest.mark.full)
      for rule in RULES for method in WISHES),
    *(pytest.param("native", rule, method, marks=[NATIVE, *[pytest.mark.full] * ((rule, method) in LATER)])
      for rule in RULES for method in WISHES)])
def test_q_is_the_models_distribution_after_every_control(kind: str, rule: str, method: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Node by node: the model that drafts, made anew and run by hand over the text and the node's path, then the slow
    pipeline. Requests with different controls draft together. A reduced target goes on from the target's own keys and
    values of all but the last token."""
    wish = WISHES[method] | {"k": 3, "adaptive": False, "verify": rule}
    if rule != "rejection" and "cascade" not in method:
        wish["branches"] = [2, 2]
    if kind == "llama":  # whose weights in fewer bits would run in native code otherwise
        monkeypatch.setattr("paceline.engine.drafting.models.native_library", lambda: None)
    llm = drafting_llm(kind)
    watch = Watch(llm, wish)
    wanted = [SamplingParams(max_tokens=7, ignore_eos=True, seed=seed, **controls)
              for seed, controls in enumerate(CONTROLS)]
    outs = llm.generate([PROMPT] * len(wanted), wanted, speculation=wish)
    assert all(out.error is None and out.speculation.failure is None for out in outs)
    own = method in ("draft", "cascade")
    model = alone(method, kind)
    if (method, kind) == ("precision", "native"):  # native code rounds in its own way: the engine's model, run by hand
        model = watch.drafter.model._runner.model, NativeKernels()
    reader = Reader(model if own else alone("target", kind), model)
    checked = [0] * len(wanted)
    for params, (text, tree) in zip(watch.params, watch.proposals, strict=True):
        if tree is None:
            continue
        assert tree.q is not None and len(tree.q) == len(tree)
        paths: list[list[int]] = [[]]
        after: dict[int, np.ndarray] = {}
        for token, parent, q in zip(tree.tokens, tree.parents, tree.q):
            path = paths[parent + 1]
            paths.append([*path, token])
            if parent not in after:
                logits = reader.logits(params.seed, text, path)
                after[parent] = distribution(logits, params, [*text[len(PROMPT):], *path])
                checked[params.seed] += 1
            assert np.array_equal(q > 0.0, after[parent] > 0.0) and q[token] > 0.0
            np.testing.assert_allclose(q, after[parent], rtol=1e-10, atol=0.0)
    assert min(checked) >= 4, "every request drafted, more than once, deeper than one token"


@pytest.mark.parametrize("method", ["draft", "exit"])
@pytest.mark.parametrize("rule", RULES)
def test_siblings_share_one_q(rule: str, method: str) -> None:
    llm = drafting_llm()
    wish = WISHES[method] | {"k": 4, "adaptive": False, "verify": rule, "branches": 1 if rule == "rejection" else 3}
    watch = Watch(llm, wish)
    llm.generate([PROMPT], SamplingParams(max_tokens=24, ignore_eos=True, seed=1, **CONTROLS[-1]), speculation=wish)
    trees = [tree for _, tree in watch.proposals if tree is not None]
    assert trees
    for tree in trees:
        assert tree.is_chain == (rule == "rejection")
        for node, parent in enumerate(tree.parents):
            siblings = [other for other, its in enumerate(tree.parents) if its == parent]
            assert all(tree.q[other] is tree.q[node] for other in siblings)
            if rule == "without-replacement":
                assert len({tree.tokens[other] for other in siblings}) == len(siblings)


@each(method=[name for name in WISHES if name != "cascade on one cache"], rule=RULES)
def test_drafts_are_drawn_from_q(rule: str, method: str) -> None:
    """400 seeds, the same prompt: after the same text q is the same every time, and what is drawn follows it. Of two
    siblings the pairs are counted: the second follows q whatever the first is, or q without the first. Too sharp or
    too flat a draw shows best in the mean of log q."""
    llm = drafting_llm(max_num_seqs=64)
    wish = WISHES[method] | {"k": 1, "adaptive": False, "verify": rule}
    siblings = rule != "rejection" and method != "cascade"  # whose drafts are chains
    if siblings:
        wish["branches"] = 2
    watch = Watch(llm, wish)
    llm.generate([PROMPT] * 400, [SamplingParams(max_tokens=3, temperature=0.5, top_k=9, seed=seed, ignore_eos=True)
                                  for seed in range(400)], speculation=wish)
    by_text: dict[tuple[int, ...], list[Any]] = {}
    for tokens, tree in watch.proposals:
        if tree is not None:
            by_text.setdefault(tuple(tokens), []).append(tree)
    counts, laws = [], []
    surplus = variance = 0.0
    for trees in by_text.values():
        q = trees[0].q[0]
        assert all(np.array_equal(tree.q[0], q) for tree in trees)
        logs = np.log(q, where=q > 0.0, out=np.zeros(VOCAB))
        mean = float(q @ logs)
        surplus += sum(logs[tree.tokens[0]] - mean for tree in trees)
        variance += len(trees) * float(q @ (logs - mean) ** 2)
        law = q
        seen = np.zeros((VOCAB, VOCAB) if siblings else VOCAB)
        for tree in trees:
            seen[tuple(tree.tokens)] += 1
        if siblings:
            law = np.outer(q, q)
            if rule == "without-replacement":
                np.fill_diagonal(law, 0.0)
                law /= np.maximum(1.0 - q, 1e-12)[:, None]
        counts.append(seen)
        laws.append(law * len(trees))
    drafts = sum(map(np.sum, counts))
    assert drafts >= 400 and chi_square(np.array(counts), np.array(laws) / drafts) > 1e-4
    assert abs(surplus) < 4.5 * variance ** 0.5


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_by_the_target_itself_is_always_accepted(rule: str) -> None:
    """q = p: u < p/q holds for every u."""
    wish = {"method": "draft", "model": "same", "verify": rule, "k": 4, "adaptive": False,
            "branches": 1 if rule == "rejection" else 2}
    params = SamplingParams(max_tokens=41, ignore_eos=True, seed=1234567, temperature=0.9, top_p=0.95, top_k=40)
    stats = drafting_llm().generate([PROMPT], params, speculation=wish)[0].speculation
    assert stats.failure is None and stats.mean_accepted_length == 5.0
    assert stats.overlapped > 0 and stats.expected_acceptance == pytest.approx(1.0)
