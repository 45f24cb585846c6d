"""Trained heads as drafters: at the edges of a text, with adapters, when they break, and what they say they sampled
from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adapters.test_equality import llm_with
from adapters.test_equality import model as adaptable
from engine.device.on_device import executor_of
from engine.test_head_storage import PROMPTS, drafts_of
from engine.tiny import VOCAB, tiny_llm
from paceline import SamplingParams
from paceline.kernels import cpu
from paceline.models.heads.interface import Opened, Planes
from speculation.model_drafting import FAST, Watch, target
from speculation.trained_heads import random_head

KINDS = ["dspark", "eagle3", "medusa"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [50, 52, 57])
def test_texts_end_where_the_model_does(kind: str, longest: int) -> None:
    """A block would reach beyond the last position there is: it is cut."""
    model = target(FAST)
    prompts = [PROMPTS[0], PROMPTS[0][:44], PROMPTS[1]]
    params = [SamplingParams(max_tokens=None, ignore_eos=True, temperature=temperature, seed=4)
              for temperature in (0.0, 0.8, 0.0)]
    options: dict[str, Any] = {"max_model_len": longest, "block_size": 4, "kv_blocks": 3 * math.ceil(longest / 4)}
    plain = tiny_llm(model, **options).generate(prompts, params, speculation=None)
    head = random_head(kind, model)
    llm = tiny_llm(model, trained={"it": head}, **options)
    _, texts = drafts_of(llm, {"method": kind, "k": 8, "adaptive": False}, prompts, params)
    assert texts == [out.outputs[0].token_ids for out in plain]
    assert [len(prompt) + len(text) for prompt, text in zip(prompts, texts)] == [longest] * 3
    assert not any(plane[:4].any() for planes in llm.engine.storage.planes for plane in planes), "block 0 stays zero"


@pytest.mark.parametrize("kind", KINDS)
def test_requests_with_adapters_are_drafted_for_in_repeated_steps(kind: str) -> None:
    """What the head reads of the target is what the adapter made of it, and blocks are kept apart by adapters. On the
    host they are drafted for in the matrix, by heads that have learned their target."""
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
    names = [None, "one", "two", "one"]
    prompts = [PROMPTS[1]] * 4
    expected = [out.outputs[0].token_ids for out in llm_with().generate(prompts, params, adapter=names)]
    assert expected[0] != expected[1] != expected[2]
    llm = llm_with(kernels="stepped", trained={"it": random_head(kind, adaptable("llama"))})
    executor_of(llm).how_often = lambda *_: 3
    for _ in range(2):
        outs = llm.generate(prompts, params, adapter=names, speculation={"method": kind, "k": 3, "adaptive": False})
        assert [out.outputs[0].token_ids for out in outs] == expected
        assert all(out.speculation is not None and out.speculation.failure is None for out in outs)


class Breaking:
    """A head that breaks in one of its rounds, the one that it is tried out in included."""

    def __init__(self, head: Any, at: int) -> None:
        self._head, self._left = head, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def open(self, opened: Opened, planes: Planes, kernels: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("the head is broken")
        return self._head.open(opened, planes, kernels)


def test_a_head_that_breaks_loses_its_drafts_and_nothing_else() -> None:
    model = target(FAST)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(PROMPTS, params, speculation=None)]
    broken_head: Any = Breaking(random_head("dspark", model), 4)
    llm = tiny_llm(model, trained={"broken": broken_head, "fine": random_head("eagle3", model)})
    wishes = [{"method": "dspark", "adaptive": False}, {"method": "eagle3", "adaptive": False}, None, "ngram"]
    outs = llm.generate(PROMPTS, params, speculation=wishes)
    assert [out.outputs[0].token_ids for out in outs] == plain
    broken, fine = outs[0].speculation, outs[1].speculation
    assert broken is not None and "the head is broken" in str(broken.failure) and broken.cycles == 2
    assert fine is not None and fine.failure is None and fine.cycles > 4
    assert llm.engine.cache.usage().used == 0


@pytest.mark.parametrize(("rule", "shape"), [
    ("rejection", {}), ("multi-round", {"branches": 2}), ("without-replacement", {"branches": 2}),
    ("multi-round", {"tree": True, "top_k": 3, "nodes": 9}), ("without-replacement", {"branches": [2, 2]})])
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_drafts_are_sampled_from_what_they_say(kind: str, rule: str, shape: dict[str, Any]) -> None:
    """q is a distribution over the tokens that the head knows, and its likeliest token comes as often as it says."""
    model = target(FAST)
    head = random_head(kind, model)
    assert head.target_ids is not None
    unknown = torch.ones(VOCAB, dtype=torch.bool)
    unknown[head.target_ids] = False
    llm = tiny_llm(model, trained={"it": head}, max_num_seqs=32)
    wish = {"method": kind, "k": 3, "adaptive": False, "verify": rule, **shape}
    watch = Watch(llm, wish)
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7, seed=seed) for seed in range(60)]
    outs = llm.generate([PROMPTS[1]] * 60, params, speculation=wish)
    assert all(out.speculation is not None and out.speculation.failure is None for out in outs)
    hits = expected = variance = 0.0
    for _, tree in watch.proposals:
        for node, parent in enumerate([] if tree is None else tree.parents):
            assert tree is not None and tree.q is not None
            q = tree.q[node]
            assert q is not None and abs(q.sum() - 1.0) < 1e-9 and not q[unknown.numpy()].any()
            assert q[tree.tokens[node]] > 0.0
            if parent not in tree.parents[:node]:  # the first of its siblings
                best = float(q.max())
                hits += tree.tokens[node] == int(q.argmax())
                expected += best
                variance += best * (1.0 - best)
    assert variance > 50 and abs(hits - expected) < 4.0 * math.sqrt(variance)


@pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
def test_heads_beside_native_code_share_its_rounding_and_not_its_company() -> None:
    """The drafts of a text are the same alone and beside others, though torch sums what lies between the products."""
    model = target("native int8")
    params = [SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)] * 4
    for kind in KINDS:
        wish = {"method": kind, "k": 3, "adaptive": False}
        together, _ = drafts_of(tiny_llm(model, trained={"it": random_head(kind, model)}), wish, PROMPTS, params)
        for prompt in PROMPTS:
            alone, _ = drafts_of(tiny_llm(model, trained={"it": random_head(kind, model)}), wish, [prompt], params[:1])
            assert alone and all(together[text] == draft for text, draft in alone.items())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_medusa_drafts_a_whole_tree(temperature: float) -> None:
    """Every node goes on with what its depth offers, which is the same below all of them; the chain is among it."""
    model = target(FAST)
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=seed) for seed in range(4)]
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(PROMPTS, params, speculation=None)]
    trees, texts = drafts_of(tiny_llm(model, trained={"it": random_head("medusa", model)}),
                             {"method": "medusa", "branches": [3, 2, 1], "k": 3, "adaptive": False}, PROMPTS, params)
    assert texts == plain
    chains, _ = drafts_of(tiny_llm(model, trained={"it": random_head("medusa", model)}),
                          {"method": "medusa", "k": 3, "adaptive": False}, PROMPTS, params)
    whole = [text for text, (tokens, _, _) in trees.items() if len(tokens) == 15]
    assert len(whole) > 10
    for text in whole:
        tokens, parents, _ = trees[text]
        assert parents == [-1] * 3 + [0, 0, 1, 1, 2, 2] + [3, 4, 5, 6, 7, 8]
        assert tokens[3:9] == tokens[3:5] * 3 and len(set(tokens[9:])) == 1 and len(set(tokens[:3])) == 3
        if text in chains and len(chains[text][0]) == 3:
            assert [tokens[0], tokens[3], tokens[9]] == chains[text][0]


@pytest.mark.parametrize("kind", ["eagle3", "hydra", "dspark"])
def test_a_dynamic_tree_begins_with_what_a_chain_would_sample(kind: str) -> None:
    """With the target's noise: the first child is the noisy best, siblings compete for one token."""
    model = target(FAST)
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=seed) for seed in range(4)]
    wish = {"method": kind, "k": 3, "adaptive": False}
    chains, texts = drafts_of(tiny_llm(model, trained={"it": random_head(kind, model)}), wish, PROMPTS, params)
    trees, same = drafts_of(tiny_llm(model, trained={"it": random_head(kind, model)}),
                            wish | {"tree": True, "top_k": 4, "nodes": 12}, PROMPTS, params)
    assert same == texts
    both = [text for text in trees if text in chains]
    assert len(both) > 20
    for text in both:
        tokens, parents, scores = trees[text]
        assert tokens[0] == chains[text][0][0] and scores is not None
        for parent in set(parents):
            siblings = [score for score, above in zip(scores, parents) if above == parent]
            assert siblings == sorted(siblings, reverse=True) and sum(siblings) <= 1.0 + 1e-6
