"""The equality matrix with real drafters on a card: in deterministic mode every request gets the tokens it gets alone
with speculation off, whatever drafts for it, as chain or tree, greedy or drawn with all controls, alone, in a crowd, in
chunks, preempted, swapped, on a warm cache or beside requests with an adapter.

Subjects: a small model of random weights, where look-ups and the target's own layers draft; with --family FOLDER
(tests/family) a tiny trained one with a draft model and heads, random ones of the kinds that nobody has trained; with
--model a real one. --quantization first rounds the target of the latter two, as `paceline quantize` does. --least says
how much trained drafters must have had accepted in a cell that proves something. What cannot run is named, with what it
lacks.

Prints a table, a line a drafter and a column a circumstance, and exits with 1 where a token differs or a drafter fails.
Without a card (--device cpu with TRITON_INTERPRET=1) the same code runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from made import QUANTIZATIONS, in_few_bits
from paceline.bench.report import Row, document, json_argument, say
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.speculation.spec import HEADS, TOLD
from subjects import LOADED, OPENINGS, SMALL, FamilySubject, RandomSubject, RealSubject, Subject, random_adapter

WISHES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "tree": True, "factor": 3.0},
    "lookahead": {"method": "lookahead"},
    "skip": {"method": "skip"},
    "skip tree": {"method": "skip", "branches": [2, 1, 2]},
    "exit": {"method": "exit"},
    "exit tree": {"method": "exit", "branches": [2, 2]},
    "draft": {"method": "draft", "model": LOADED},
    "draft tree": {"method": "draft", "model": LOADED, "branches": [2, 1, 2, 1]},
    "draft small": {"method": "draft", "model": SMALL, "branches": 2},
    "precision": {"method": "precision", "bits": 8},
    "cascade": {"method": "cascade", "drafter": "ngram", "by": {"method": "exit"}},
    "specinfer": {"method": "specinfer", "drafters": ["ngram", "lookahead", "exit"]},
    "merge": {"method": "merge", "drafters": ["ngram", "suffix", "skip"]},
    "auto": {"method": "auto"},
    "auto adaptive": {"method": "auto", "adaptive": True,
                       "drafters": ["ngram", {"method": "draft", "model": LOADED}]},
    **{kind: {"method": kind} for kind in HEADS},
    "dspark siblings": {"method": "dspark", "branches": 3},
    "medusa tree": {"method": "medusa", "branches": [3, 2, 2]},
    "merge of heads": {"method": "merge", "drafters": ["eagle3", {"method": "dspark", "branches": 2}, "ngram"]},
    "cascade of a head": {"method": "cascade", "drafter": "dspark", "by": {"method": "draft", "model": LOADED}},
    "prediction": {"method": "prediction"},
    "right chain": {"method": "oracle", "k": 7},
    "right tree": {"method": "oracle", "branches": 3},
    "wrong tree": {"method": "wrong", "branches": 2},
    "plain": {},
}
"""By name; "plain" runs beside the others without a drafter."""
STYLES = ("greedy", "seeded", "controlled", "random")
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "alone": {},
    "crowd": {},
    "chunks": {"max_prefill_chunk": 7},
    "ahead": {"schedule_ahead": True},
    "launched": {"capture": "never"},
    "preempted": {"watermark": 0.0, "preemption": "recompute"},
    "swapped": {"watermark": 0.0, "preemption": "swap", "swap_space": 0.1},
    "warm": {"enable_prefix_caching": True},
    "adapters": {"enable_prefix_caching": True},
}
"""By name, with the engine's options."""
CROWDED = {"preempted": "preemptions", "swapped": "swap_blocks_in"}
"""Circumstances with room for about one request at a time, and what is counted where they come about."""
HEADED = (*HEADS, "dspark siblings", "medusa tree", "merge of heads", "cascade of a head")
"""Drafters that need a subject with trained heads."""
TRAINED = (*HEADED, "draft small")
"""Drafters that have learned their target, where the subject has them: a cell in which they are not accepted proves
nothing."""
LEAST = 0.03
"""Of the tokens of a trained drafter's texts, what is to have been drafted in each cell that proves something. It
cannot be asked for on a device where heads are in company of drafters of the host: they draft in repeated steps
alone."""
ADAPTER = "added"
BLOCK = 16
Text = tuple[list[int], str | None]


@dataclass(frozen=True)
class Case:
    """One request of the matrix."""

    wish: str
    style: str
    prompt: list[int]
    params: SamplingParams
    adapter: str | None = None


@dataclass(frozen=True)
class Outcome:
    case: Case
    circumstance: str
    found: Text
    expected: Text
    accepted: int
    failure: str | None

    @property
    def fine(self) -> bool:
        return self.found == self.expected and self.failure is None

    def as_dict(self) -> dict[str, Any]:
        place = next((at for at, (ours, theirs) in enumerate(zip(self.expected[0], self.found[0])) if ours != theirs),
                     min(len(self.expected[0]), len(self.found[0])))
        return {"drafter": self.case.wish, "style": self.case.style, "circumstance": self.circumstance,
                "adapter": self.case.adapter, "first_difference": place, "expected": self.expected,
                "found": self.found, "failure": self.failure}


def params_of(style: str, seed: int, vocab: int, count: int) -> SamplingParams:
    """The sampling controls of a style; "random" ones are drawn from the seed."""
    fixed: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40},
        "controlled": {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3,
                       "frequency_penalty": 0.1, "logit_bias": {5: 1.5, 9: -2.0}, "no_repeat_ngram_size": 3}}
    luck = random.Random(seed)
    optional: dict[str, Any] = {
        "top_k": luck.randint(1, 50), "top_p": luck.uniform(0.5, 1.0), "min_p": luck.uniform(0.0, 0.1),
        "repetition_penalty": luck.uniform(0.8, 1.4), "presence_penalty": luck.uniform(-0.5, 1.0),
        "frequency_penalty": luck.uniform(-0.5, 1.0), "no_repeat_ngram_size": luck.randint(2, 4),
        "logit_bias": {luck.randrange(vocab): luck.uniform(-4.0, 4.0) for _ in range(4)},
        "allowed_token_ids": luck.sample(range(vocab), vocab // 2),
        "stop_token_ids": [luck.randrange(vocab)], "min_tokens": luck.randint(0, 4), "logprobs": 2}
    chosen = fixed.get(style) or {"temperature": luck.choice([0.0, 0.7, 1.3])} | {
        name: optional[name] for name in luck.sample(sorted(optional), 5)}
    return SamplingParams(max_tokens=count, ignore_eos=True, seed=seed, on_empty_support="stop", **chosen)


def cases_of(subject: Subject, wishes: Sequence[str], styles: Sequence[str], count: int) -> list[Case]:
    cases = []
    for index, wish in enumerate(wishes):
        for number, style in enumerate(styles):
            seed = 1000 * index + number
            cases.append(Case(wish, style, subject.prompt(seed), params_of(style, seed, subject.vocab_size, count)))
    return cases


def wish_of(case: Case, expected: Text) -> dict[str, Any] | None:
    """What to ask the engine for. Drafts are made in every step, whether they pay or not, unless the wish says so."""
    if not WISHES[case.wish]:
        return None
    wish = {"k": 4, "nodes": 24, "adaptive": False} | WISHES[case.wish]
    return wish | {"tokens": expected[0]} if wish["method"] in TOLD else wish


def plain_texts(subject: Subject, cases: Sequence[Case]) -> list[Text]:
    """Alone, without speculation."""
    llm = _engine(subject, cases, enable_prefix_caching=False, kv_blocks=_blocks(cases), block_size=BLOCK)
    return [_texts(llm.generate([case.prompt], case.params, adapter=case.adapter, speculation=None))[0]
            for case in cases]


def beside_adapters(subject: Subject, cases: Sequence[Case],
                    expected: Sequence[Text]) -> tuple[list[Case], list[Text]]:
    """The cases, and beside each of them the same with an adapter."""
    adapted = [replace(case, adapter=ADAPTER) for case in cases]
    texts = plain_texts(subject, adapted)
    if all(one == other for one, other in zip(texts, expected)):
        raise PacelineError("The adapter changes no text: this cell proves nothing.")
    return [*cases, *adapted], [*expected, *texts]


def outcomes(subject: Subject, circumstance: str, cases: Sequence[Case], expected: Sequence[Text]) -> list[Outcome]:
    """Every case under one circumstance. A crowd is all of them at once."""
    if circumstance == "adapters":
        cases, expected = beside_adapters(subject, cases, expected)
    own = _blocks([max(cases, key=_length)])
    room = own + own // 2 if circumstance in CROWDED else _blocks(cases)
    options = {"enable_prefix_caching": False, "kv_blocks": room, "block_size": BLOCK} | CIRCUMSTANCES[circumstance]
    if circumstance in CROWDED:
        options["max_model_len"] = own * BLOCK
    llm = _engine(subject, cases, **options)
    wishes = [wish_of(case, text) for case, text in zip(cases, expected)]
    if circumstance == "alone":
        found = [llm.generate([case.prompt], case.params, speculation=wish)[0] for case, wish in zip(cases, wishes)]
    else:
        for _ in range(2 if options["enable_prefix_caching"] else 1):
            found = llm.generate([case.prompt for case in cases], [case.params for case in cases],
                                 adapter=[case.adapter for case in cases], speculation=wishes)
    if circumstance in CROWDED and len(cases) > 1 and llm.metrics()[CROWDED[circumstance]] == 0:
        raise PacelineError(f"Nobody was {circumstance}: this cell proves nothing; give it more requests.")
    llm.engine.cache.check([])
    stats = [out.speculation for out in found]
    return [Outcome(case, circumstance, text, want, 0 if stat is None else stat.accepted,
                    None if stat is None else stat.failure)
            for case, text, want, stat in zip(cases, _texts(found), expected, stats)]


def _engine(subject: Subject, cases: Sequence[Case], **options: Any) -> LLM:
    llm = subject.llm(**options)
    if any(case.adapter for case in cases):
        llm.engine.adapters.add(ADAPTER, random_adapter(ADAPTER, subject.model, scale=subject.adapter_scale))
    return llm


def run(subject: Subject, wishes: Sequence[str] = tuple(WISHES), styles: Sequence[str] = STYLES,
        circumstances: Sequence[str] = tuple(CIRCUMSTANCES), count: int = 32, least: float = 0.0) -> dict[str, Any]:
    """The document: a row a cell, the differences beside them. `least`: the share of their tokens that drafters that
    have learned their target must have drafted in each cell."""
    for given, known, what in ((wishes, WISHES, "drafter"), (styles, STYLES, "style"),
                               (circumstances, CIRCUMSTANCES, "circumstance")):
        wrong = [name for name in given if name not in known]
        if wrong:
            raise ConfigError(f"No {what} {wrong[0]!r}: use some of {', '.join(known)}.")
    skipped = {wish: lack for wish in wishes if (lack := subject.lacks(WISHES[wish])) is not None}
    if "adapters" in circumstances and not subject.adapts:
        skipped["adapters"] = "a model that runs in native code as a whole"
    for name, lack in skipped.items():
        say(f"matrix: {name} skipped: {lack}")
    wishes = [wish for wish in wishes if wish not in skipped]
    circumstances = [circumstance for circumstance in circumstances if circumstance not in skipped]
    if not wishes or not circumstances:
        raise ConfigError("Nothing of what was asked for can run with this subject.")
    began = time.perf_counter()
    cases = cases_of(subject, wishes, styles, count)
    expected = plain_texts(subject, cases)
    if sum(len(set(tokens)) > 2 for tokens, _ in expected) * 2 < len(expected):
        raise PacelineError("Most texts are one token over and over: equality would mean nothing.")
    say(f"matrix: {len(cases)} requests decoded plainly ({time.perf_counter() - began:.0f} s)")
    rows: list[Row] = []
    wrong_ones: list[dict[str, Any]] = []
    for circumstance in circumstances:
        found = outcomes(subject, circumstance, cases, expected)
        for wish in dict.fromkeys(case.wish for case in cases):
            own = [one for one in found if one.case.wish == wish]
            rows.append(Row(f"{wish} / {circumstance}", "equal", sum(one.fine for one in own),
                            note=f"of {len(own)}, {sum(one.accepted for one in own)} drafts accepted"))
            tokens = sum(len(one.found[0]) for one in own)
            learned = wish in TRAINED and wish not in subject.untrained
            if learned and sum(one.accepted for one in own) < least * tokens:
                raise PacelineError(f"{rows[-1].case}: {rows[-1].note} in {tokens} tokens: this cell proves nothing.")
        wrong_ones += [one.as_dict() for one in found if not one.fine]
        say(f"matrix: {circumstance}: {sum(one.fine for one in found)} of {len(found)} equal "
            f"({time.perf_counter() - began:.0f} s)")
    return document(rows, subject=subject.name, tokens=count, styles=list(styles)) | {
        "differences": wrong_ones, "skipped": skipped}


def table(result: dict[str, Any]) -> str:
    """A line a drafter, a column a circumstance: requests that are equal of all, and the drafts accepted in them."""
    cells: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        wish, circumstance = row["case"].split(" / ")
        total, accepted = row["note"].removeprefix("of ").split(", ")
        cells.setdefault(wish, {})[circumstance] = f"{row['paceline']:.0f}/{total} ({accepted.split()[0]})"
    columns = list(next(iter(cells.values()), {}))
    width = max(len(wish) for wish in cells)
    lines = [" " * width + "".join(f"  {name:>12}" for name in columns)]
    lines += [f"{wish:{width}}" + "".join(f"  {line[name]:>12}" for name in columns) for wish, line in cells.items()]
    lines += [f"{name}: skipped, {lack}" for name, lack in result["skipped"].items()]
    return "\n".join([*lines, f"{result['settings']['subject']}: equal/requests (drafts accepted)"])


def _texts(outs: Sequence[Any]) -> list[Text]:
    for out in outs:
        if out.error is not None:
            raise out.error
    return [(list(out.outputs[0].token_ids), out.outputs[0].finish_reason) for out in outs]


def _length(case: Case) -> int:
    return len(case.prompt) + (case.params.max_tokens or 0)


def _blocks(cases: Sequence[Case]) -> int:
    """Cache for all of them at once, drafts included."""
    return sum(-(-(_length(case) + 32) // BLOCK) for case in cases)


def chosen(given: argparse.Namespace, made: Path) -> Subject:
    """What the command line says; a target in few bits is written to `made`."""
    if given.quantization is not None and given.family is None and given.model is None:
        raise ConfigError("--quantization rounds a model that is stored: give one (--family or --model).")
    model = given.model if given.family is None else str(given.family / "target")
    if given.quantization is not None:
        model = str(in_few_bits(model, given.quantization, "\n".join(OPENINGS), made, given.device))
    if given.family is not None:
        return FamilySubject.of(given.family, given.device, given.dtype, given.kernels, given.kv_dtype,
                                target=Path(model))
    if model is None:
        return RandomSubject.small(given.device, given.dtype)
    return RealSubject.of(LLM(model, device=given.device, dtype=given.dtype, deterministic=True,
                              kernels=given.kernels, kv_blocks=64, max_model_len=1024))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/matrix.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a model's file or name instead of random weights")
    parser.add_argument("--family", type=Path, default=None, help="a folder that tools/tiny_family.py made, instead")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=None,
                        help="of the target; a card computes with what the codes stand for")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="triton", help="`stepped`: a card's steps in plain torch on a CPU")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--least", type=float, default=0.0, metavar="SHARE",
                        help=f"of their tokens that trained drafters must have drafted in each cell, such as {LEAST}")
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    for name, known in (("drafters", WISHES), ("styles", STYLES), ("circumstances", CIRCUMSTANCES)):
        parser.add_argument(f"--{name}", default=",".join(known), help="separated by commas")
    json_argument(parser)
    given = parser.parse_args()
    wishes, styles, around = (getattr(given, name).split(",") for name in ("drafters", "styles", "circumstances"))
    try:
        with tempfile.TemporaryDirectory() as made:
            subject = replace(chosen(given, Path(made)), kv_dtype=given.kv_dtype, kernels=given.kernels)
            result = run(subject, wishes, styles, around, given.tokens, given.least)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    text = json.dumps(result, indent=2)
    print(text if given.json == "-" else table(result))
    if given.json not in (None, "-"):
        Path(given.json).write_text(text + "\n")
    for one in result["differences"]:
        say(str(one))
    if result["differences"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
