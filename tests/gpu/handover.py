"""Blocks handed from one engine to another on a card, while both decode: texts as without, and what it takes.

Two engines of the same weights decode a crowd each; between any two steps blocks of a prompt leave the one and come
into the other, in host memory and on the card. Whoever then asks for the prompt must find its blocks and have the
text of an engine alone, and so must the crowds. Last a process of its own reads blocks by CUDA IPC, to the byte.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from models import SHAPES
from paceline.bench.report import Row, document, json_argument, say
from paceline.cluster.transfer.cuda_ipc import CudaIpcTransport
from paceline.engine.core import Engine
from paceline.engine.exchange import PrefixBlocks, joined
from paceline.errors import PacelineError
from paceline.request import SamplingParams
from subjects import RandomSubject
from verdict import conclude

ARCHITECTURES = ("llama", "mistral", "gemma2", "deepseek_dense")
PLAIN = SamplingParams(temperature=0.8, max_tokens=24, seed=5, ignore_eos=True)


def exported(engine: Engine, prompt: list[int], on_device: bool) -> PrefixBlocks:
    """All that the engine has of a prompt; it goes on decoding meanwhile."""
    parts: list[PrefixBlocks] = []
    while True:
        first = len(parts[-1].tokens) // parts[-1].block_size if parts else 0
        part = engine.exchange.export_prefix(prompt, "", first, most_bytes=1 << 16, on_device=on_device)
        engine.step()
        if part is not None and not any(part.pieces):
            return joined(parts)
        if part is not None:
            parts.append(part)


def handed_over(subject: RandomSubject, on_device: bool, crowd: int, **options: Any) -> tuple[list[str], float]:
    """What went wrong, and bytes a second out and in, waiting for steps included."""
    source, target, alone = (subject.llm(**options).engine for _ in range(3))
    prompt = [(7 * i + 3) % subject.vocab_size for i in range(301)]
    company = [subject.prompt(seed) for seed in range(crowd)]
    names = {id(engine): [engine.add(one, replace(PLAIN, max_tokens=120), speculation="ngram") for one in company]
             for engine in (source, target)}
    first = source.add(prompt, replace(PLAIN, max_tokens=1))
    while source.scheduler.sequences(first):
        source.step()
        target.step()
    started = time.perf_counter()
    blocks = exported(source, prompt, on_device)
    for part in blocks.parts(1 << 16):
        while target.exchange.import_prefix(part, prompt, "") is None:
            target.step()
        target.step()
    rate = 2 * blocks.nbytes / (time.perf_counter() - started)
    wrong = []
    record = finished(target, target.add(prompt, PLAIN))
    whole = (len(prompt) - 1) // target.config.block_size * target.config.block_size
    if record.metrics.cached_tokens != whole:
        wrong.append(f"{record.metrics.cached_tokens} of {whole} tokens were found")
    if tokens(record) != tokens(finished(alone, alone.add(prompt, PLAIN))):
        wrong.append("the text differs")
    for engine in (source, target):
        for name, one in zip(names[id(engine)], company):
            if tokens(finished(engine, name)) != tokens(finished(alone, alone.add(one, replace(
                    PLAIN, max_tokens=120)))):
                wrong.append("the text of one of the crowd differs")
        engine.cache.check([])
    return wrong, rate


def finished(engine: Engine, name: str) -> Any:
    while engine.has_work:
        engine.step()
    return engine.take(name)


def tokens(record: Any) -> list[int]:
    return list(record.snapshot().outputs[0].token_ids)


def _read(ticket: Any, answer: Any) -> None:
    """In another process."""
    started = time.perf_counter()
    blocks = asyncio.run(CudaIpcTransport().fetch(ticket))
    sums = [int(rows.to(torch.int64).sum()) for rows in blocks.data]
    answer.put((sums, time.perf_counter() - started))
    del blocks


def shared(subject: RandomSubject) -> list[str]:
    """By CUDA IPC."""
    engine = subject.llm().engine
    prompt = [(5 * i + 3) % subject.vocab_size for i in range(301)]
    finished(engine, engine.add(prompt, replace(PLAIN, max_tokens=1)))
    blocks = exported(engine, prompt, on_device=True)

    async def run() -> list[str]:
        transport = CudaIpcTransport()
        ticket = await transport.offer(blocks)
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        reader = context.Process(target=_read, args=(ticket, answer))
        reader.start()
        sums, seconds = await asyncio.to_thread(answer.get, timeout=120)
        reader.join()
        transport.close()
        say(f"handover: CUDA IPC opened and summed up {blocks.nbytes / 1e6:.1f} MB in {seconds:.3f} s")
        return [] if sums == [int(rows.to(torch.int64).sum()) for rows in blocks.data] else ["CUDA IPC: other bytes"]

    return asyncio.run(run())


def check(names: Sequence[str] = ARCHITECTURES, device: str = "cuda", dtype: str = "bfloat16", crowd: int = 6,
          changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """`changes`: to all shapes; `options`: of the engines."""
    rows: list[Row] = []
    failures: list[str] = []
    for name in names:
        subject = RandomSubject.small(device, dtype, **({"model_type": name} | SHAPES[name] | (changes or {})))
        for on_device in (False, True):
            case = f"{name} / {'on the device' if on_device else 'by the host'}"
            try:
                wrong, rate = handed_over(subject, on_device, crowd, **options)
            except PacelineError as problem:
                wrong, rate = [str(problem)], 0.0
            rows.append(Row(case, "MB/s", rate / 1e6))
            failures += [f"{case}: {one}" for one in wrong]
    if device != "cpu":
        failures += shared(RandomSubject.small(device, dtype))
    return document(rows, device=device) | {"failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/handover.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES), help="separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    json_argument(parser)
    given = parser.parse_args()
    conclude(lambda: check(given.architectures.split(","), given.device, given.dtype), given.json)


if __name__ == "__main__":
    main()
