"""Trees of trained heads, on a small family that was really trained: the text is plain decoding's whatever happens to
it, and a tree yields more than a chain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams

FAMILY = Path(__file__).parent.parent / "family"
KINDS = ("eagle3", "mtp", "hydra", "medusa", "dspark")
PROMPTS = ["The history of the", "Once upon a time there was", "def main(", "A list of"]
TREE = {"tree": True, "top_k": 4, "nodes": 20}
SPARSE = {"choices": True, "nodes": 20}
TIGHT: dict[str, Any] = {"block_size": 8, "kv_blocks": 24, "max_model_len": 128, "watermark": 0.0, "max_num_seqs": 10}


def family(**options: Any) -> LLM:
    return LLM(str(FAMILY / "target"), heads=[str(FAMILY / kind) for kind in KINDS], threads=1, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield family(max_num_seqs=10, max_model_len=256)


def wish(kind: str, more: dict[str, Any], k: int = 4) -> dict[str, Any]:
    return {"method": kind, "k": k, "adaptive": False, **more}


def asked() -> tuple[list[str], list[SamplingParams], list[dict[str, Any]]]:
    """Every head, greedy and seeded, with both kinds of trees."""
    prompts, params, wishes = [], [], []
    for place, (kind, temperature) in enumerate((kind, warm) for kind in KINDS for warm in (0.0, 0.8)):
        prompts.append(PROMPTS[place % len(PROMPTS)])
        params.append(SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=place))
        wishes.append(wish(kind, SPARSE if place % 3 == 2 else TREE))
    return prompts, params, wishes


def texts(outs: list[Any]) -> list[list[int]]:
    assert all(out.speculation is None or out.speculation.failure is None for out in outs)
    return [out.outputs[0].token_ids for out in outs]


def test_texts_are_plain_decodings_in_a_crowd_alone_and_preempted(llm: LLM) -> None:
    prompts, params, wishes = asked()
    plain = texts(llm.generate(prompts, params, speculation=None))
    assert texts(llm.generate(prompts, params, speculation=wishes)) == plain
    for place in (1, 2, 4):
        assert texts(llm.generate(prompts[place:place + 1], params[place:place + 1], speculation=wishes[place])) \
            == plain[place:place + 1]
    tight = family(**TIGHT)
    outs = tight.generate(prompts, params, speculation=wishes)
    assert texts(outs) == plain and tight.engine.scheduler.preemptions > 0
    assert tight.engine.cache.usage().used == 0


def test_a_tree_ends_where_the_model_does() -> None:
    """There is no place for all of its nodes any more, then for none."""
    short = family(block_size=8, max_model_len=40, max_num_seqs=4)
    params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
    plain = texts(short.generate(PROMPTS[:2], params, speculation=None))
    for kind in ("eagle3", "hydra"):
        assert texts(short.generate(PROMPTS[:2], params, speculation=wish(kind, TREE, 8))) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_yields_more_than_a_chain(llm: LLM, kind: str) -> None:
    params = [SamplingParams(max_tokens=32, ignore_eos=True, temperature=temperature, seed=4)
              for temperature in (0.0, 0.0, 0.8, 0.8)]
    lengths = []
    for shape in ({}, TREE, SPARSE):
        stats = [out.speculation for out in llm.generate(PROMPTS, params, speculation=wish(kind, shape))]
        lengths.append(sum(one.emitted for one in stats) / sum(one.cycles for one in stats))
        assert all(len(one.acceptance_by_position) in (3, 4) and sorted(one.by_depth, reverse=True) == one.by_depth
                   and sum(one.by_depth) == one.accepted for one in stats), "of a tree, by depth"
    assert lengths[1] > lengths[0] and lengths[2] > lengths[0]


def test_typical_acceptance_takes_its_thresholds(llm: LLM) -> None:
    """What passes nothing leaves the target's own text; what passes anything takes longer paths than the exact rule."""
    params = [SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=seed) for seed in range(4)]
    plain = texts(llm.generate(PROMPTS, params, speculation=None))
    found = {}
    for name, numbers in {"usual": {}, "strict": {"epsilon": 1.0, "delta": 1.0}, "lax": {"epsilon": 0.0}}.items():
        outs = llm.generate(PROMPTS, params, speculation=wish("medusa", {**TREE, "verify": "typical", **numbers}))
        assert all(out.speculation is not None and out.speculation.lossy for out in outs)
        found[name] = texts(outs), sum(out.speculation.accepted for out in outs if out.speculation is not None)
    assert found["lax"][1] > found["usual"][1] > found["strict"][1]
    assert found["lax"][0] != plain
