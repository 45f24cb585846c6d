"""The real weights on a card: greedy tokens in float32 against those of the CPU, teacher-forced.

In two runs, because the two machines need not be the same: without a card (or with --write) the reference is made, in
plain torch on the CPU, and holds for every prompt its tokens, the best tokens and the distance of the two best logits
at every place. With --reference the same model runs on the card, TF32 off, and is compared twice:

- decoded: as the engine decodes, captured steps and all. Where a token differs the reference's is put in its place
  and the text goes on from there, so every token is compared behind the same tokens;
- read: prompt and reference in one pass, the best token of every place.

deviation: the largest difference of the distance of the two best logits between the two machines, over all places.
A difference is a tie when the reference's two best are no further apart than that, and the deviation is no more than
rounding explains (LIMIT).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.engine.build import choose_device
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.request import RequestOutput, SamplingParams

LIMIT = 0.02
"""Logits are of the size of 20 here; float32 sums of a thousand terms in another order differ by far less."""
SUBJECTS = ("a lighthouse in winter", "how bread rises", "the moons of Jupiter", "a lost umbrella", "prime numbers",
            "the history of the bicycle", "a market at dawn", "why leaves turn red", "an old railway bridge",
            "sorting a list in Python")
TASKS = ("Write the beginning of a story about {}.", "Explain {} to a child in a few sentences.",
         "List five questions that one could ask about {}.",
         "Here are some notes. " + "They were taken in a hurry, on a train, and some of them repeat themselves. " * 12
         + "Continue them with a paragraph about {}.",
         "Translate into French: I have been thinking about {} all day.")


@dataclass(frozen=True)
class Item:
    """One prompt and what the reference makes of it. gaps: best logit - second best, before each token."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    seconds: list[int]
    """The second best token of each place."""


@dataclass(frozen=True)
class Difference:
    """Where the card chose another token than the reference. place counts the item's tokens."""

    way: str
    item: int
    place: int
    expected: int
    found: int
    gap: float


def questions(llm: LLM, count: int) -> list[list[int]]:
    """Prompts of our own making, as the model was trained to see them."""
    texts = [task.format(subject) for subject, task in product(SUBJECTS, TASKS)]
    if not 1 <= count <= len(texts):
        raise ConfigError(f"--prompts must be 1 to {len(texts)}, got {count}.")
    return [llm.render([{"role": "user", "content": text}]) for text in texts[:count]]


def reference(llm: LLM, prompts: Sequence[list[int]], count: int) -> list[Item]:
    """Greedy tokens of each prompt, to the end of `count` tokens whatever they are."""
    items = []
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=2)
    for out in _checked(llm.generate(list(prompts), params)):
        best = [list(one.top.items()) for one in out.outputs[0].logprobs or ()]
        items.append(Item(out.prompt_token_ids, out.outputs[0].token_ids,
                          [first[1] - second[1] for first, second in best], [second[0] for _, second in best]))
    return items


def decoded(llm: LLM, items: Sequence[Item]) -> list[Difference]:
    """Where decoding differs. All items at once; those that differ go on behind the reference's token."""
    found: list[Difference] = []
    ahead = [(index, 0) for index in range(len(items))]
    while ahead:
        prompts = [items[index].prompt + items[index].tokens[:place] for index, place in ahead]
        params = [SamplingParams(max_tokens=len(items[index].tokens) - place, temperature=0.0, ignore_eos=True)
                  for index, place in ahead]
        differing = []
        for (index, place), out in zip(ahead, _checked(llm.generate(prompts, params))):
            item = items[index]
            for at, (ours, theirs) in enumerate(zip(item.tokens[place:], out.outputs[0].token_ids), place):
                if ours != theirs:
                    found.append(Difference("decoded", index, at, ours, theirs, item.gaps[at]))
                    differing.append((index, at + 1))
                    break
        ahead = [(index, place) for index, place in differing if place < len(items[index].tokens)]
    return found


def read(llm: LLM, items: Sequence[Item]) -> tuple[list[Difference], list[float]]:
    """Where reading the reference's own text differs; and of every place how far the two best are apart here less how
    far they are in the reference."""
    found: list[Difference] = []
    deviations: list[float] = []
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2, ignore_eos=True)
    outs = _checked(llm.generate([item.prompt + item.tokens for item in items], params))
    for index, (item, out) in enumerate(zip(items, outs)):
        scores = (out.prompt_logprobs or [])[len(item.prompt):]
        for place, (score, expected, gap) in enumerate(zip(scores, item.tokens, item.gaps, strict=True)):
            assert score is not None
            (best, high), (second, low) = list(score.top.items())[:2]
            if best != expected:
                found.append(Difference("read", index, place, expected, best, gap))
            if {best, second} == {expected, item.seconds[place]}:
                ours = high - low if best == expected else low - high
                deviations.append(abs(ours - gap))
    return found, deviations


def compare(llm: LLM, items: Sequence[Item], name: str) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows of a report about one engine, and its differences, each with whether it is a tie."""
    apart, deviations = read(llm, items)
    differences = decoded(llm, items) + apart
    deviation = max(deviations)
    notes = [asdict(one) | {"engine": name, "tie": one.gap <= deviation <= LIMIT} for one in differences]
    places = sum(len(item.tokens) for item in items)
    rows = [Row(f"{name}: {way}, equal", "tokens", places - sum(note["way"] == way for note in notes),
                note=f"of {places}") for way in ("decoded", "read")]
    rows.append(Row(f"{name}: largest deviation", "logit", deviation, higher_is_better=False,
                    note=f"mean {sum(deviations) / len(deviations):.2g} over {len(deviations)} places"))
    rows += [Row(f"{name}: {note['way']}, prompt {note['item']}, token {note['place']}", "gap", note["gap"],
                 note=f"{note['expected']} on the CPU, {note['found']} here: "
                      f"{'a tie' if note['tie'] else 'NOT A TIE'}") for note in notes]
    return rows, notes


def write(path: str | Path, model: str | None, prompts: int, count: int) -> None:
    llm = LLM(model, device="cpu", dtype="float32", kernels="eager", max_num_seqs=16)
    items = reference(llm, questions(llm, prompts), count)
    Path(path).write_text(json.dumps({"revision": llm.engine.revision, "items": [asdict(item) for item in items]}))
    gaps = sorted(gap for item in items for gap in item.gaps)
    say(f"truth: {len(items)} prompts, {len(gaps)} tokens; the least distances of the two best: "
        f"{', '.join(f'{gap:.2g}' for gap in gaps[:5])}")


def run(path: str | Path, model: str | None, device: str = "cuda") -> dict[str, Any]:
    """The comparison's document; `differences` beside its rows."""
    try:
        stored = json.loads(Path(path).read_text())
        items = [Item(**item) for item in stored["items"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(f"{path} is no reference ({problem}): make one with --write on a machine with the same "
                          "model.") from None
    choose_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows: list[Row] = []
    notes: list[dict[str, Any]] = []
    for name, deterministic in (("fast", False), ("deterministic", True)):
        llm = LLM(model, device=device, dtype="float32", kernels="triton", deterministic=deterministic,
                  max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False)
        if llm.engine.revision != stored["revision"]:
            raise ConfigError(f"{path} was made with model {stored['revision']}, this is {llm.engine.revision}: make "
                              "it again with --write.")
        more, found = compare(llm, items, name)
        rows += more
        notes += found
        say(f"truth: {name}: {len(found)} differences")
        del llm
    return document(rows, model=model or "default", prompts=len(items), dtype="float32", tf32=False,
                    ) | {"differences": notes}


def _checked(outs: list[RequestOutput]) -> list[RequestOutput]:
    for out in outs:
        if out.error is not None:
            raise out.error
    return outs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/truth.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", metavar="FILE", help="make the reference on the CPU")
    way.add_argument("--reference", metavar="FILE", help="compare a card with it")
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    json_argument(parser)
    given = parser.parse_args()
    try:
        if given.write is not None:
            write(given.write, given.model, given.prompts, given.max_tokens)
            return
        result = run(given.reference, given.model)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    emit(result, given.json)
    if not all(note["tie"] for note in result["differences"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
