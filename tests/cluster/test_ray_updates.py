"""Replicas of a real Ray are replaced, then scaled down, while streams run: no client notices."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import write_model

from paceline import LLM, SamplingParams
from paceline.cluster.family import descendants, end
from paceline.cluster.options import ClusterOptions

pytest.importorskip("ray")

from paceline.cluster import deploy
from paceline.cluster.reading import ModelTexts
from paceline.cluster.replica import ReplicaOptions
from paceline.cluster.serving import front

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"), pytest.mark.slow,
              pytest.mark.full]

PROMPTS = [f"{number}: once upon a time there was a small engine" for number in range(4)]


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=700, temperature=1.0, ignore_eos=True, seed=seed)


async def streamed(llm: Any, change: Callable[[], Any]) -> tuple[list[str], list[Any]]:
    """What clients hear while something changes, and how they were moved."""
    begun, texts, moved = [asyncio.Event() for _ in PROMPTS], [""] * len(PROMPTS), []

    async def follow(number: int) -> None:
        async for delta in await llm.stream(llm.engine.prepare(PROMPTS[number], params(number))):
            texts[number] += "".join(sample.text for sample in delta.samples)
            begun[number].set()
            if delta.output is not None and delta.output.moved is not None:
                moved.append(delta.output.moved)

    async def changing() -> None:
        for one in begun:
            await one.wait()
        await asyncio.to_thread(change)

    await asyncio.gather(changing(), *(follow(number) for number in range(len(PROMPTS))))
    return texts, moved


def test_replicas_come_and_go_while_streams_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    alone = LLM(str(folder), deterministic=True)
    expected = [output.outputs[0].text for output in alone.generate(PROMPTS, [params(number) for number in range(4)])]
    options = ClusterOptions(replicas=2, threads=1, drain_s=10.0)
    replica = ReplicaOptions({"model": str(folder), "deterministic": True, "device": "cpu"}, 1)
    with deploy.running_ray(options):
        llm = front(deploy.run(options, deploy.deployments(options, replica, 0)), ModelTexts.read(str(folder)),
                    "127.0.0.1")

        def change(number: int) -> None:
            """Every run is a new version to Serve, so all of them are replaced."""
            other = replace(options, replicas=number)
            deploy.run(other, deploy.deployments(other, replica, 0))

        async def main() -> None:
            times = 0
            for number in (2, 1):
                before = set(llm.replicas)
                texts, moved = await streamed(llm, lambda number=number: change(number))
                assert texts == expected
                assert all(one.exact for one in moved)
                times += len(moved)
                while len(llm.replicas) != number or llm.replicas & before:
                    await asyncio.sleep(0.1)
            assert times, "nobody had anything to do when it left"

        try:
            asyncio.run(asyncio.wait_for(main(), 300.0))
        finally:
            llm.close()
    end(descendants())
