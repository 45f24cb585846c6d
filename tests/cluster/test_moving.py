"""A stream that changes workers says what it would have said without: every token, every character, every score."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.mortal import UNBORN, Crew, Heard, Mortal, check_nothing_runs, follow, hear, mortal
from grammar.structured import token, tokenizer
from paceline.async_llm import AsyncLLM
from paceline.cluster.moving import MovingStream
from paceline.cluster.order import Order
from paceline.cluster.worker import LocalWorker
from paceline.request import SamplingParams, Tenant

PROMPT = tokenizer().encode('A list: {"name": "Ada", "age": 36, "tags": ["yes", "no"]} and another: ')
NEW = 22
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 80, "top_p": 0.97, "min_p": 0.001}
PENALISED: dict[str, Any] = {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.6,
                             "frequency_penalty": 0.4, "logit_bias": {token("a"): 3.0, token("b"): -5.0}}
MASKED: dict[str, Any] = {"temperature": 1.0, "bad_words": ("a", "name"), "no_repeat_ngram_size": 2,
                          "min_tokens": 6, "stop_token_ids": (token("e"), token('"'))}
FAMILY = Path(__file__).parents[1] / "family"
HEADS = ("eagle3", "mtp", "dspark")
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "greedy": (GREEDY, None),
    "greedy, ngram": (GREEDY, "ngram"),
    "sampled, all scores": (SAMPLED | {"logprobs": 3, "prompt_logprobs": 2}, None),
    "penalties, three samples": (PENALISED | {"n": 3, "logprobs": 0}, None),
    "penalties, suffix": (PENALISED, "suffix"),
    "masks": (MASKED, None),
    "masks, three samples, drafts": (MASKED | {"n": 3}, {"method": "merge", "drafters": ["ngram", "suffix"]}),
    "schema": (SAMPLED | {"json_schema": SCHEMA, "max_tokens": 60}, None),
    "schema, three samples, drafts": (SAMPLED | {"json_schema": SCHEMA, "max_tokens": 60, "n": 3}, "ngram"),
    "regex": (SAMPLED | {"regex": "(yes|no|true|[0-9]){3,12}!"}, "suffix"),
    "choice": (SAMPLED | {"choice": ("yes and no", "name and age", "true")}, None),
    "lookahead": (SAMPLED, "lookahead"),
    "auto": (SAMPLED | {"logprobs": 1}, "auto"),
    "skip": (SAMPLED, {"method": "skip", "k": 3}),
    "exit, three samples": (SAMPLED | {"n": 3}, {"method": "exit", "k": 3}),
    "past the end": (SAMPLED | {"ignore_eos": True, "priority": 3, "cache_salt": "salt"}, "ngram"),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Mortal]]:
    """Three that cut their work up differently."""
    made = [mortal("one"), mortal("two", block_size=16, max_batch_tokens=19), mortal("three", max_num_seqs=2)]
    yield made
    for worker in made:
        worker.inner._llm.close()


def order_of(params: dict[str, Any], speculation: Any = None, seed: int = 7, name: str = "r") -> Order:
    return Order.of(name, PROMPT, SamplingParams(**{"max_tokens": NEW, "seed": seed} | params),
                    speculation=speculation, tenant=Tenant("somebody"))


def deaths_for(luck: random.Random) -> list[int]:
    """After how many tokens workers die: never two at once without a token between them."""
    found: list[int] = []
    for _ in range(luck.randint(1, 4)):
        found += [luck.choice([UNBORN, 0]), luck.randint(1, 9)] if luck.random() < 0.3 else [luck.randint(1, 9)]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_moves_is_the_undisturbed_one(name: str, workers: list[Mortal]) -> None:
    params, speculation = CASES[name]
    luck = random.Random(name)
    order = order_of(params, speculation, luck.randrange(1 << 64))
    calm, _ = follow(order, workers[:1], [])
    assert calm.output is not None and calm.output.moved is None
    wild, crew = follow(order, luck.sample(workers, 3), deaths_for(luck))
    wild.check_same(calm)
    assert wild.output is not None and wild.output.moved is not None and len(crew.chosen) > 1
    assert wild.output.moved.times == len(crew.chosen) - 1
    assert wild.output.moved.exact
    asyncio.run(check_nothing_runs(workers))


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Mortal]]:
    """Two that sample on a device, as far as it can."""
    made = [mortal("four", kernels="stepped"), mortal("five", kernels="stepped", block_size=16)]
    yield made
    for worker in made:
        worker.inner._llm.close()


@pytest.mark.parametrize("name", ["penalties, three samples", "schema, three samples, drafts", "auto"])
def test_on_a_device(name: str, devices: list[Mortal]) -> None:
    params, speculation = CASES[name]
    luck = random.Random(name)
    order = order_of(params, speculation, luck.randrange(1 << 64))
    calm, _ = follow(order, devices[:1], [])
    follow(order, devices, deaths_for(luck))[0].check_same(calm)


@pytest.fixture(scope="module")
def family() -> Iterator[tuple[list[int], list[Mortal]]]:
    """A prompt, and two of a small model that was really trained, with heads that were too."""
    options: dict[str, Any] = {"deterministic": True, "threads": 1, "max_model_len": 256, "warm_up": False,
                               "heads": [str(FAMILY / kind) for kind in HEADS]}
    made = [Mortal(LocalWorker(AsyncLLM(str(FAMILY / "target"), **own, **options), name))
            for name, own in (("six", {}), ("seven", {"block_size": 8, "max_batch_tokens": 19}))]
    tokenizer = made[0].inner._llm.engine.tokenizer
    assert tokenizer is not None
    yield tokenizer.encode("It is a truth universally acknowledged, that a"), made
    for worker in made:
        worker.inner._llm.close()


@pytest.mark.parametrize(("kind", "more"), [("eagle3", {"tree": True, "top_k": 4, "nodes": 12}), ("mtp", {}),
                                            ("dspark", {})])
def test_a_trained_head_drafts_after_the_move_as_before(kind: str, more: dict[str, Any],
                                                        family: tuple[list[int], list[Mortal]]) -> None:
    """What it knows of the text is made anew from the tokens: the same text, and drafts that are accepted."""
    prompt, workers = family
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True, logprobs=1)
    order = Order.of("r", prompt, params, speculation={"method": kind, "k": 4, "adaptive": False, **more})
    calm, _ = follow(order, workers[:1], [])
    wild, _ = follow(order, workers, [6, UNBORN, 5])
    wild.check_same(calm)
    assert wild.output is not None and wild.output.moved is not None
    assert (wild.output.moved.times, wild.output.moved.exact) == (3, True)
    stats = wild.output.speculation
    assert stats is not None and stats.failure is None and stats.accepted > 0
    asyncio.run(check_nothing_runs(workers))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_more_seeds_and_deaths(name: str, seed: int, workers: list[Mortal]) -> None:
    params, speculation = CASES[name]
    luck = random.Random(f"{name} {seed}")
    order = order_of(params, speculation, luck.randrange(1 << 64))
    calm, _ = follow(order, workers[:1], [])
    follow(order, luck.sample(workers, 3), deaths_for(luck))[0].check_same(calm)


def test_a_stop_string_may_be_cut_anywhere(workers: list[Mortal]) -> None:
    luck = random.Random(5)
    for seed in range(2):
        free, _ = follow(order_of(SAMPLED, seed=seed), workers[:1], [])
        text = free.texts[0]
        begin = luck.randrange(len(text) // 3, len(text) - 4)
        stop = text[begin:begin + luck.randint(2, 9)]
        order = order_of(SAMPLED | {"stop": (stop, stop[:-1] + "~", "nowhere")}, seed=seed)
        calm, _ = follow(order, workers[:1], [])
        assert calm.ends[0] == ("stop", stop)
        for dies_after in {len(calm.tokens[0]) // 2, *range(len(calm.tokens[0]) - 3, len(calm.tokens[0]))}:
            wild, _ = follow(order, workers[:2], [dies_after])
            wild.check_same(calm)


def test_every_single_cut(workers: list[Mortal]) -> None:
    """After each of its tokens, of a text with half characters in it."""
    raw = tuple(tokenizer().encode("é✓🙂ü")) + (token("a"),)
    order = order_of({"temperature": 1.0, "allowed_token_ids": raw, "max_tokens": 9, "stop": ("aa✓",)}, "ngram")
    calm, _ = follow(order, workers[:1], [])
    assert calm.told[0, 2] != calm.texts[0]
    for dies_after in range(1, len(calm.tokens[0])):
        follow(order, workers[:2], [dies_after])[0].check_same(calm)


def test_many_streams_at_once_while_workers_die(workers: list[Mortal]) -> None:
    luck = random.Random(11)
    orders = [order_of(*CASES[luck.choice(list(CASES))], seed=luck.randrange(1 << 32), name=f"r{place}")
              for place in range(4)]
    calm = [follow(order, workers[:1], [])[0] for order in orders]

    async def all_of_them() -> list[Heard]:
        crews = [Crew(luck.sample(workers, 3), deaths_for(luck)) for _ in orders]
        return list(await asyncio.gather(*(hear(MovingStream(order, crew.choose))
                                           for order, crew in zip(orders, crews))))

    for wild, quiet in zip(asyncio.run(all_of_them()), calm):
        wild.check_same(quiet)
    asyncio.run(check_nothing_runs(workers))
