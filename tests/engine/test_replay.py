"""Replay: the text of a trace comes back on an engine built from what the trace says, whatever decided about drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import VOCAB, tiny_engine, tiny_llm
from paceline import LLM, SamplingParams
from paceline.cli.main import main
from paceline.engine.core import Engine
from paceline.engine.decide import decider
from paceline.engine.decide.recording import recorded
from paceline.engine.replay import compare_setups, read_trace, replay, replay_on
from paceline.errors import EmptySupportError, RequestError
from paceline.kernels import cpu
from paceline.sampling import trace as traces
from paceline.sampling.cycles import Cycle
from paceline.sampling.trace import Trace
from speculation.bigrams import BigramDrafter, register, tables

FAMILY = Path(__file__).parents[1] / "family"
PROMPTS = ["Call me Ishmael. Some years ago", "It is a truth universally", "To Sherlock Holmes she is always"]
RULES: dict[str, dict[str, Any]] = {
    "coupled": {"branches": 2}, "rejection": {}, "multi-round": {"branches": [2, 2, 1]},
    "without-replacement": {"branches": [3, 1, 1]}, "typical": {"branches": 2}}
FAST = "reference" if cpu.load() is None else "native"
NO_NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native code is not built")
MARKS = {"native": [NO_NATIVE]} | {name: [pytest.mark.full] for name in ("reference", "stepped", "eager")}
ALWAYS = {("rejection", "stepped"), ("multi-round", "stepped"), ("typical", "eager"), ("coupled", "eager"),
          ("without-replacement", "reference"), ("rejection", "reference")}
"""Two rules on each backend; the native one has all."""
CASES = [pytest.param(rule, kernels, marks=[] if (rule, kernels) in ALWAYS else marks)
         for rule in RULES for kernels, marks in MARKS.items()]
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=3, trace=True, ignore_eos=True)


def family(**options: Any) -> LLM:
    """Few blocks: three requests do not fit, and one of them is preempted."""
    return LLM(str(FAMILY / "target"), block_size=4, kv_blocks=18, max_model_len=64, heads=[], threads=1,
               preemption="recompute", **options)


def wish(rule: str) -> dict[str, Any]:
    return {"method": "draft", "model": str(FAMILY / "draft"), "k": 3, "verify": rule, **RULES[rule]}


def crowd(llm: LLM, rule: str) -> list[Any]:
    """Traces of requests side by side, drafted for as the controller thinks best; the first always is."""
    each = [replace(SAMPLED, seed=seed) for seed in range(len(PROMPTS))]
    wishes = [wish(rule) | {"adaptive": seed > 0} for seed in range(len(PROMPTS))]
    outs = llm.generate(PROMPTS, each, speculation=wishes)
    assert all(out.error is None and out.speculation.failure is None for out in outs)
    return outs


@pytest.mark.parametrize(("rule", "kernels"), CASES)
def test_every_rule_replays_on_every_backend(rule: str, kernels: str, tmp_path: Path) -> None:
    llm = family(kernels=kernels)
    outs = crowd(llm, rule)
    assert llm.engine.scheduler.preemptions > 0 and outs[0].trace.cycles
    reports = [replay(written(outs[0], tmp_path / "trace.json"), model=str(FAMILY / "target")),
               *(replay_on(llm.engine, out.trace) for out in outs[1:])]
    for out, report in zip(outs, reports):
        assert report.ran and not report.differences and not report.notes
        assert out.trace.setup.deterministic == (kernels != "eager")
        # Eager kernels add in an order that depends on the company, which a replay has not: they promise this up to
        # ties (two tokens within some 1e-6 of one another), of which these few texts meet none.
        assert report.equal and report.tokens == out.outputs[0].token_ids


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_alone_eager_kernels_replay_too(rule: str, tmp_path: Path) -> None:
    """A replay has the same steps, with the same rows, as a request that had no company."""
    out = family(kernels="eager").generate([PROMPTS[0]], SAMPLED, speculation=wish(rule) | {"adaptive": False})[0]
    report = replay(written(out, tmp_path / "trace.json"), model=str(FAMILY / "target"))
    assert out.trace.cycles and report.equal and not report.deterministic


def test_what_was_drafted_decides_the_text_and_comes_from_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its cycles the same request has another text: what is compared above is not compared for nothing."""
    llm = family(kernels=FAST)
    traces = {rule: llm.generate([PROMPTS[0]], SAMPLED, speculation=wish(rule) | {"adaptive": False})[0].trace
              for rule in RULES}
    engine = family(kernels=FAST).engine
    monkeypatch.setattr(engine.draft_models, "source", None)  # nothing could be drafted with
    for rule, trace in traces.items():
        assert replay_on(engine, trace).equal
        assert replay_on(engine, replace(trace, cycles=[])).equal == (rule == "coupled")


def test_a_replay_has_the_cycles_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions, trees, who proposed what, and of q what was read: the trace of a replay is the trace."""
    for rule, shape in (("rejection", (1, 1, 1)), ("multi-round", (2, 2)), ("without-replacement", (3, 1))):
        register(monkeypatch, BigramDrafter(tables(VOCAB, 1), shape, replace=rule != "without-replacement"))
        out = tiny_llm().generate([[1, 2, 3]], replace(SAMPLED, seed=8), speculation={
            "method": "bigram", "verify": rule, "k": 4, "adaptive": False})[0]
        trace = Trace.from_json(out.trace.to_json())
        assert trace == out.trace and trace.rule == rule
        again = replayed(tiny_engine(), trace)
        assert again.cycles == trace.cycles and again.tokens == trace.tokens


def replayed(engine: Engine, trace: Trace) -> Trace:
    """The trace that a replay makes."""
    made: list[Trace] = []
    take = engine.take

    def watched(request_id: str) -> Any:
        record = take(request_id)
        made.append(record.trace)
        return record

    engine.take = watched  # type: ignore[method-assign]
    replay_on(engine, trace)
    return made[0]


def test_of_an_accepted_draft_only_its_own_chance_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, BigramDrafter(tables(VOCAB, 1), (1, 1, 1)))
    out = tiny_llm().generate([[1, 2, 3]], replace(SAMPLED, max_tokens=60), speculation={
        "method": "bigram", "verify": "rejection", "k": 4, "adaptive": False})[0]
    sizes = [[len(one.tokens) for one in cycle.q] for cycle in out.trace.cycles]
    assert any(size == [1, VOCAB, 1] or size[0] == 1 for size in sizes)  # something was accepted
    assert all(size.count(VOCAB) <= 1 for size in sizes) and any(VOCAB in size for size in sizes)


def test_a_structure_is_not_drafted_for_anew() -> None:
    """Forced tokens are cycles of the trace like others."""
    from grammar.structured import PROMPT, structured_llm
    params = SamplingParams(seed=5, trace=True, regex="(yes, indeed|no, never) [a-z]{3}")
    out = structured_llm().generate([PROMPT], params, speculation={"method": "ngram", "verify": "typical",
                                                                   "adaptive": False})[0]
    assert any(cycle.drafter == "grammar" for cycle in out.trace.cycles)
    assert replayed(structured_llm().engine, out.trace).cycles == out.trace.cycles


def test_a_request_that_failed_is_compared_as_far_as_it_came() -> None:
    """Its replay fails in the same place, which is the same text."""
    params = replace(SAMPLED, allowed_token_ids=(5, 6), no_repeat_ngram_size=1)
    trace = tiny_llm().generate([[1, 2, 3]], params)[0].trace
    assert trace.finish_reason == "error" and len(trace.tokens) == 2
    assert replay_on(tiny_engine(), Trace.from_json(trace.to_json())).equal
    with pytest.raises(EmptySupportError):  # it had not failed then
        replay_on(tiny_engine(), replace(trace, finish_reason="length"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ends", [
    {"stop_when": lambda: lambda piece: " " in piece}, {"interrupt": lambda text, ids: len(ids) >= 5}],
    ids=lambda ends: next(iter(ends)))
def test_what_a_callable_ended_is_compared_up_to_there(ends: dict[str, Any], rule: str, tmp_path: Path) -> None:
    out = family(kernels=FAST).generate([PROMPTS[0]], replace(SAMPLED, **ends),
                                        speculation=wish(rule) | {"adaptive": False})[0]
    assert out.trace.cut_short and 0 < len(out.trace.tokens) < 20
    report = replay(written(out, tmp_path / "trace.json"), model=str(FAMILY / "target"))
    assert report.equal and report.tokens == report.expected == out.outputs[0].token_ids
    trace = read_trace(tmp_path / "trace.json")
    assert not replay_on(family(kernels=FAST).engine, replace(trace, cut_short=False)).equal
    trace.tokens[-1].token += 1
    assert not replay_on(family(kernels=FAST).engine, trace).equal


def test_a_callable_that_ended_nothing_cuts_nothing() -> None:
    llm = family(kernels=FAST)
    trace = llm.generate([PROMPTS[0]], replace(SAMPLED, stop_when=lambda: lambda piece: False))[0].trace
    assert not trace.cut_short and trace.finish_reason == "length" and replay_on(llm.engine, trace).equal


def test_a_trace_that_grew_too_large_is_compared_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_NUMBERS", 400)
    made: list[Cycle] = []
    monkeypatch.setattr(decider, "recorded", lambda *given: made.append(recorded(*given)) or made[-1])
    register(monkeypatch, BigramDrafter(tables(VOCAB, 1), (1, 1, 1)))
    out = tiny_llm().generate([[1, 2, 3]], SAMPLED, speculation={
        "method": "bigram", "verify": "rejection", "k": 4, "adaptive": False})[0]
    trace = Trace.from_json(out.trace.to_json())
    assert trace.cut is not None and trace.cycles and trace.cycles[-1].start < trace.cut
    assert len(made) == len(trace.cycles) + 1 < out.speculation.cycles, "nobody waits for what is not kept"
    report = replay_on(tiny_engine(), trace)
    assert report.equal and 0 < len(report.expected) == trace.cut - 3 < report.recorded == 20


# ---------------------------------------------------------------------------------------------- what is named

def written(out: Any, path: Path, **setup: Any) -> Path:
    document = out.trace.as_dict()
    document["setup"] |= setup
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def plain_trace() -> Any:
    return family(kernels=FAST).generate([PROMPTS[0]], SAMPLED)[0]


@pytest.mark.parametrize(("setup", "said"), [
    ({"model": "sha256:0"}, "model: trace: sha256:0, here: sha256:"),
    ({"tokenizer": "another"}, "tokenizer: trace: another, here: "),
    ({"device": "cuda"}, "setup: trace: device cuda"),
    ({"kv_dtype": "int8", "kernels": "reference", "quantization": None}, "kv_dtype='int8'"),
    ({"kernels": "fpga"}, "kernels: trace: fpga, here: "),
    ({"eos": "7"}, "eos: trace: 7, here: 0"),
])
def test_what_cannot_be_rebuilt_is_named(setup: dict[str, Any], said: str, plain_trace: Any, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    if setup.get("device") == "cuda":
        import torch
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = written(plain_trace, tmp_path / "trace.json", **setup)
    assert main(["replay", str(path), "--model", str(FAMILY / "target")]) == 3
    told = capsys.readouterr()
    assert said in told.err.replace("\n", " ") and "cannot be rebuilt here" in told.out.replace("\n", " ")


def test_the_options_come_from_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.engine import replay as module

    asked: list[Any] = []
    build: Callable[..., Engine] = module.build_engine
    monkeypatch.setattr(module, "build_engine", lambda options, progress: asked.append(options) or build(options))
    llm = LLM(str(FAMILY / "target"), kernels="eager", kv_dtype="float16", dtype="float16", max_model_len=77)
    out = llm.generate([PROMPTS[0]], replace(SAMPLED, max_tokens=3))[0]
    report = replay(written(out, tmp_path / "trace.json"), model=str(FAMILY / "target"))
    assert report.equal and not report.differences
    options = asked[0]
    assert (options.kernels, options.kv_dtype, options.dtype, options.max_model_len) == (
        "eager", "float16", "float16", 77)


def test_a_cache_smaller_than_the_context_comes_back(tmp_path: Path) -> None:
    """Some models rotate by the positions that they were built for, wherever their cache ends."""
    llm = LLM(str(FAMILY / "target"), kernels=FAST, block_size=4, kv_blocks=9, heads=[])
    out = llm.generate([PROMPTS[0]], replace(SAMPLED, max_tokens=None))[0]
    setup = out.trace.setup
    assert (setup.max_model_len, setup.built_for) == (36, 1024) and out.outputs[0].finish_reason == "length"
    report = replay(written(out, tmp_path / "trace.json"), model=str(FAMILY / "target"))
    assert report.equal and not report.differences


@NO_NATIVE
@pytest.mark.parametrize("options", [{"quantization": "blocks"}, {"adapters": {}}, {"kv_dtype": "float32"},
                                     {"dtype": "bfloat16"}])
def test_native_forms_come_back(options: dict[str, Any], tmp_path: Path) -> None:
    """The last one packs weights that were rounded before."""
    out = family(kernels="native", **options).generate([PROMPTS[0]], replace(SAMPLED, max_tokens=30))[0]
    assert out.trace.setup.native_forward == ("adapters" not in options)
    assert out.trace.setup.dtype == options.get("dtype", "float32")
    report = replay(written(out, tmp_path / "trace.json"), model=str(FAMILY / "target"))
    assert report.equal and not report.differences


def test_anyway_runs_what_there_is(plain_trace: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(plain_trace, tmp_path / "trace.json", model="sha256:0")
    assert main(["replay", str(path), "--model", str(FAMILY / "target"), "--anyway", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] and told["differences"][0]["field"] == "model"


def test_other_versions_are_noted_and_keep_nobody(plain_trace: Any, tmp_path: Path) -> None:
    report = replay(written(plain_trace, tmp_path / "trace.json", version="9.9", torch="1.0"),
                    model=str(FAMILY / "target"))
    assert report.ran and report.equal and [one.field for one in report.notes] == ["torch", "version"]


def test_a_trace_has_nothing_opened(tmp_path: Path) -> None:
    """It may come from anybody, and name any file, or a model to fetch: its drafts are in it, and none is made anew."""
    out = family(kernels=FAST).generate([PROMPTS[0]], SAMPLED, speculation=wish("rejection"))[0]
    out.trace.speculation = {"method": "merge", "k": 4, "drafters": ["ngram", {"method": "draft", "model": "no/body"}]}
    assert replay(written(out, tmp_path / "trace.json"), model=str(FAMILY / "target")).equal


def test_an_adapter_that_is_not_here_is_named(plain_trace: Any) -> None:
    trace = replace(plain_trace.trace, adapter="mine@sha256:1")
    found, _ = compare_setups(trace, family(kernels=FAST).engine)
    assert [str(one) for one in found] == ["adapter: trace: mine@sha256:1, here: none of that name (--lora)"]


# ---------------------------------------------------------------------------------------------- bad files

def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="check the path"):
        replay(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(RequestError, match="newer version of Paceline"):
        replay(tmp_path / "bad.json")
    monkeypatch.setattr("paceline.engine.replay.MOST_BYTES", 4)
    with pytest.raises(RequestError, match="more than"):
        read_trace(tmp_path / "bad.json")


@pytest.mark.parametrize(("change", "said"), [
    (lambda trace: replace(trace, rule="luck"), "rule 'luck'"),
    (lambda trace: replace(trace, cycles=[Cycle(9, [VOCAB], [-1], "x")]), f"token {VOCAB} and this model has {VOCAB}"),
])
def test_drafts_that_this_engine_cannot_verify(change: Callable[[Trace], Trace], said: str) -> None:
    out = tiny_llm().generate([[1, 2, 3]], SAMPLED, speculation="ngram")[0]
    with pytest.raises(RequestError, match=said):
        replay_on(tiny_engine(), change(out.trace))
