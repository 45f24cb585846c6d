"""Adapters on a card, with small random weights: what merged weights say, and the same bits in any company.

float32, TF32 off: a request with an adapter reads texts, and so does the model with that adapter merged; `worst` is the
largest difference of a token's log-probability. Then, deterministic, requests with either of two adapters or none run
in one crowd, and each has to have the tokens and the log-probabilities that it has alone, to the bit. Last, requests
that ask for no scores, so that steps are repeated by the device alone, plain and with drafts that it looks up: each has
to have its tokens alone, repeated steps have to have had adapters in them, and none may be launched kernel by kernel.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch

from paceline.bench.report import Row, document, json_argument
from paceline.llm import LLM
from paceline.models.load.adapters import PeftAdapter
from paceline.models.registry import build
from paceline.request import SamplingParams
from subjects import NamedWeights, RandomSubject, random_adapter
from verdict import conclude

NAMES = (None, "one", "two")
LIMIT = 2e-3
"""Of a log-probability in float32: sums in another order."""


class Merged(NamedWeights):
    """The subject's weights with an adapter's additions."""

    adapter: PeftAdapter

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        weight = super().take(name, shape, dtype)
        pair = self.adapter.pairs.get(name.removesuffix(".weight"))
        return weight if pair is None else weight + (pair.b @ pair.a * pair.scale).to(weight.device, weight.dtype)


def engine_with(subject: RandomSubject, **options: Any) -> LLM:
    llm = subject.llm(**options)
    for name in NAMES:
        if name is not None:
            llm.engine.adapters.add(name, random_adapter(name, subject.model))
    return llm


def merged(device: str, texts: int, **options: Any) -> Row:
    """An adapter beside the model that has it in its weights."""
    subject = RandomSubject.small(device, "float32")
    config = subject.model.config
    weights = Merged(subject.device, torch.float32)
    weights.adapter = random_adapter("one", subject.model)
    other = RandomSubject("merged", build(config, weights, config.max_position_embeddings), subject.device,
                          torch.float32, None)
    score = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [subject.prompt(seed) for seed in range(texts)]
    ours = engine_with(subject, **options).generate(prompts, score, adapter="one")
    theirs = other.llm(**options).generate(prompts, score)
    gaps = [abs(a.raw - b.raw) for own, out in zip(ours, theirs)
            for a, b in zip((own.prompt_logprobs or [])[1:], (out.prompt_logprobs or [])[1:]) if a and b]
    return Row("merged weights, float32", "logprob", max(gaps), note=f"worst of {len(gaps)} tokens")


def company(device: str, dtype: str, requests: int, tokens: int, **options: Any) -> Row:
    """Requests with and without adapters in one crowd, beside themselves alone."""
    subject = RandomSubject.small(device, dtype)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, seed=seed, temperature=float(seed % 2))
              for seed in range(requests)]
    names = [NAMES[seed % len(NAMES)] for seed in range(requests)]
    prompts = [subject.prompt(seed) for seed in range(requests)]
    crowd = engine_with(subject, **options).generate(prompts, params, adapter=names)
    alone = engine_with(subject, enable_prefix_caching=False, **options)
    equal = sum(_scores(out) == _scores(alone.generate([prompt], own, adapter=name)[0])
                for out, prompt, own, name in zip(crowd, prompts, params, names))
    return Row(f"in company, {dtype}", "equal", equal, note=f"of {requests} requests")


def repeated(device: str, dtype: str, requests: int, tokens: int, speculation: Any, **options: Any) -> list[Row]:
    """The same without scores: how many texts are equal, and how often steps with adapters ran by themselves."""
    subject = RandomSubject.small(device, dtype)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, temperature=0.7 * (seed % 2))
              for seed in range(requests)]
    names = [NAMES[seed % len(NAMES)] for seed in range(requests)]
    prompts = [subject.prompt(seed) for seed in range(requests)]
    llm = engine_with(subject, **options)
    seen = count_adapted(llm)
    crowd = llm.generate(prompts, params, adapter=names, speculation=speculation)
    alone = engine_with(subject, enable_prefix_caching=False, **options)
    equal = sum(_text(out) == _text(alone.generate([prompt], own, adapter=name, speculation=None)[0])
                for out, prompt, own, name in zip(crowd, prompts, params, names))
    case = f"{speculation or 'plain'}, {dtype}"
    return [Row(f"repeated, {case}", "equal", equal, note=f"of {requests} requests"),
            Row(f"steps repeated with adapters, {case}", "steps", seen["repeated"],
                note=f"{seen['launched']} launched kernel by kernel")]


def count_adapted(llm: LLM) -> Counter[str]:
    """Steps of an engine in which some row has an adapter: repeated ones, each time, and those launched kernel by
    kernel."""
    executor: Any = llm.engine.executor
    decode, runner, seen = executor.graphs.decode, llm.engine.runner, Counter[str]()
    launch, forward = decode.launch, runner.forward

    def counted(step: Any, *more: Any) -> Any:
        seen["repeated"] += step.repeat * any(group.seq.adapter is not None for group in step.groups)
        return launch(step, *more)

    def kernel_by_kernel(batch: Any, *more: Any) -> Any:
        seen["launched"] += batch.adapters is not None
        return forward(batch, *more)

    decode.launch = counted
    runner.forward = kernel_by_kernel  # type: ignore[method-assign]
    return seen


def _text(out: Any) -> list[int]:
    if out.error is not None:
        raise out.error
    found: list[int] = out.outputs[0].token_ids
    return found


def _scores(out: Any) -> list[tuple[int, float]]:
    if out.error is not None:
        raise out.error
    return [(score.token, score.raw) for score in out.outputs[0].logprobs]


def check(device: str = "cuda", *, texts: int = 6, requests: int = 18, tokens: int = 24,
          dtypes: tuple[str, ...] = ("float32", "bfloat16"), **options: Any) -> dict[str, Any]:
    rows = [merged(device, texts, **options)]
    failures = [f"merged weights: {rows[0].paceline:.1e}"] if rows[0].paceline > LIMIT else []
    for dtype in dtypes:
        rows.append(company(device, dtype, requests, tokens, **options))
        if rows[-1].paceline < requests:
            failures.append(f"{rows[-1].case}: {rows[-1].paceline:.0f} {rows[-1].note}")
        for speculation in (None, "ngram"):
            texts_equal, steps = repeated(device, dtype, requests, tokens, speculation, **options)
            rows += [texts_equal, steps]
            if texts_equal.paceline < requests:
                failures.append(f"{texts_equal.case}: {texts_equal.paceline:.0f} {texts_equal.note}")
            if not steps.paceline or not steps.note.startswith("0 launched"):
                failures.append(f"{steps.case}: {steps.paceline:.0f}, {steps.note}")
    return document(rows, device=device) | {"failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/lora.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    json_argument(parser)
    given = parser.parse_args()
    conclude(lambda: check(given.device), given.json)


if __name__ == "__main__":
    main()
