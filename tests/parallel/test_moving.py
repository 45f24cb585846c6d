"""A stream leaves an engine whose rank is gone, and goes on elsewhere with the very same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Any

import torch

from engine.test_equality_matrix import PROMPT
from engine.tiny import tiny_engine, tiny_llm, tiny_model
from paceline import AsyncLLM, SamplingParams
from paceline.cluster.moving import MovingStream
from paceline.cluster.order import Order
from paceline.cluster.worker import LocalWorker
from paceline.engine.parallel.calls import Share
from paceline.engine.parallel.leader import Leader
from paceline.engine.parallel.together import ThreadFollowers
from paceline.kernels.reference import ReferenceKernels
from paceline.models.shard import Shard
from parallel.ranks import builder

PARAMS = SamplingParams(max_tokens=14, temperature=0.9, seed=11, ignore_eos=True)


class Mortal(ReferenceKernels):
    """Of a rank that ends after some steps."""

    left = 6

    def head(self, *args: Any, **more: Any) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise RuntimeError("the end")
        return super().head(*args, **more)


def test_a_stream_leaves_an_engine_whose_rank_is_gone() -> None:
    want = tiny_llm(tiny_model("llama")).generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    followers = ThreadFollowers(2, lambda ranks: Share(builder("llama")(Shard(ranks)), Mortal(), torch.device("cpu")),
                                patience=30.0)
    mortal = Leader(builder("llama")(Shard(followers.ranks)), followers)
    llms = [AsyncLLM(engine=tiny_engine(model)) for model in (mortal, tiny_model("llama"))]
    workers = [LocalWorker(llm, name) for llm, name in zip(llms, ("ranks", "one"))]

    async def choose(order: Order, lost: Set[str]) -> LocalWorker:
        return workers["ranks" in lost]

    async def follow() -> tuple[list[int], int]:
        said: list[int] = []
        stream = MovingStream(Order.of("r", PROMPT, PARAMS), choose)
        async for delta in stream:
            said += [token for sample in delta.samples for token in sample.token_ids]
            assert delta.output is None or delta.output.error is None
        return said, stream.moves

    said, moves = asyncio.run(follow())
    assert (said, moves) == (want, 1)
    assert not llms[0].alive and llms[1].alive
    for llm in llms:
        llm.close()
