"""What trained heads keep of every token: wherever and however the target computed it, it lies where the token lies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.on_device import executor_of
from engine.tiny import VOCAB, tiny_llm, tiny_model
from engine.toy_heads import KeepingHead, KnowingHead, shape_of
from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.trained_heads import head_folder, load_heads
from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError, RequestError
from paceline.kernels import cpu
from paceline.models.heads.formats.write import write_head
from paceline.speculation.spec import HEADS, heads_named
from paceline.speculation.spec import parse as parse_speculation
from speculation.model_drafting import Watch, target
from speculation.trained_heads import head_config, random_head, random_tensors

PROMPTS = [[(i * step + 7) % VOCAB for i in range(length)] for step, length in ((31, 45), (17, 5), (5, 90))]
PROMPTS.append(PROMPTS[0][:33] + [1, 2, 3])
NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")


def kept_by(llm: LLM) -> dict[str, torch.Tensor]:
    return {name.partition(".")[2]: plane for name, plane in llm.engine.storage.extra.items()}


def slots_of(llm: LLM, seq: Sequence, count: int) -> torch.Tensor:
    size = llm.engine.config.block_size
    table = torch.from_numpy(llm.engine.cache.tables[0][seq.allocation.seat].copy())
    places = torch.arange(count)
    return table[places // size] * size + places % size


def check_kept(llm: LLM, sums: dict[tuple[int, ...], torch.Tensor], exact: bool = True) -> int:
    """Of everybody who runs: what is kept of each computed token is that token's. `sums`: what was kept of each text so
    far. How many tokens were looked at."""
    found = 0
    planes = kept_by(llm)
    llm.engine.storage.apply(*llm.engine.scheduler.take_transfers())
    for seq in llm.engine.scheduler.running:
        count = min(seq.computed, len(seq.tokens) - 1)
        if seq.in_flight and not seq.output_len:
            continue  # who can say how far its prompt is
        if not count or not seq.seated:
            continue
        window = llm.engine.storage.groups[0].window
        begin = 0 if window is None else max(0, count - window + 1)
        slots = slots_of(llm, seq, count)[begin:]
        assert planes["ids"][slots, 0].tolist() == seq.tokens[begin:count]
        before = [-1, *seq.tokens[:count - 1]][begin:]
        if planes["ids"][slots, 1].any():
            assert planes["ids"][slots, 1].tolist() == before
        for place, slot in zip(range(begin, count), slots.tolist()):
            text = tuple(seq.tokens[:place + 1])
            known = sums.setdefault(text, planes["sums"][slot].clone())
            if exact:
                assert torch.equal(known, planes["sums"][slot])
            else:
                assert torch.allclose(known, planes["sums"][slot], atol=1e-3)
        found += len(slots)
    return found


def run(llm: LLM, params: list[SamplingParams], wishes: Any, sums: dict[tuple[int, ...], torch.Tensor],
        exact: bool = True) -> list[list[int]]:
    ids = [llm.engine.add(prompt, own, speculation=wish) for prompt, own, wish in zip(PROMPTS, params, wishes)]
    looked = 0
    while llm.engine.has_work:
        llm.engine.step()
        looked += check_kept(llm, sums, exact)
    assert looked > 100
    records = [llm.engine.take(name) for name in ids]
    assert all(record.speculation is None or record.speculation.failure is None for record in records)
    return [record.snapshot().outputs[0].token_ids for record in records]


PARAMS = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=3)
          for temperature in (0.0, 0.9, 0.0, 1.2)]
AROUND: dict[str, dict[str, Any]] = {
    "as they come": {},
    "chunks": {"max_prefill_chunk": 7},
    "ahead": {"schedule_ahead": True, "max_prefill_chunk": 16},
    "preempted": {"kv_blocks": 20, "max_model_len": 128, "watermark": 0.0, "preemption": "recompute"},
    "swapped": {"kv_blocks": 20, "max_model_len": 128, "watermark": 0.0, "preemption": "swap", "swap_space": 0.01},
    "host cache": {"kv_blocks": 24, "max_model_len": 128, "watermark": 0.0, "host_cache": 0.01},
}
KINDS = ["llama", "mistral", "native", "native int8"]


def model_of(kind: str) -> Any:
    return target(kind) if kind.startswith("native") else tiny_model(kind)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NATIVE if "native" in kind else ()) for kind in KINDS])
def test_what_is_kept_lies_where_its_token_lies(kind: str, around: str) -> None:
    """With chains and trees of other drafters, and twice: the second time the prefix cache remembers the first."""
    model = model_of(kind)
    plain = [out.outputs[0].token_ids
             for out in tiny_llm(model).generate(PROMPTS, PARAMS, speculation=None)]
    head = KeepingHead(shape_of("eagle3", model))
    llm = tiny_llm(model, trained={"toy": head}, **AROUND[around])
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    oracle: dict[str, Any] = {"method": "oracle", "branches": 2, "k": 3}
    wishes = [oracle | {"tokens": plain[0]}, {"method": "ngram"}, None, oracle | {"tokens": plain[3], "k": 5}]
    for _ in range(2):
        assert run(llm, PARAMS, wishes, sums) == plain
    assert head.stored


@pytest.mark.parametrize("repeat", [0, 1, 4])
@pytest.mark.parametrize("taps", [(0, 2), (1, 3)], ids=["inside", "behind the last layer"])
def test_captured_steps_keep_what_the_host_keeps(repeat: int, taps: tuple[int, ...]) -> None:
    """On the device loop: prompts, mixes, repeated steps, drafts that it looks up itself, and drafts of the host."""
    model = tiny_model()
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(PROMPTS, PARAMS, speculation=None)]
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    run(tiny_llm(model, trained={"toy": KeepingHead(shape_of("eagle3", model, taps))}, kernels="reference"), PARAMS,
        [None] * 4, sums)
    llm = tiny_llm(model, trained={"toy": KeepingHead(shape_of("eagle3", model, taps))}, kernels="stepped",
                   capture="lazy" if repeat else "never", max_prefill_chunk=16)
    if repeat:
        executor_of(llm).how_often = lambda *_: repeat
        executor_of(llm)._attended.goes_apart = lambda *_: False
    oracle: dict[str, Any] = {"method": "oracle", "branches": 2, "k": 3, "tokens": plain[0]}
    for wishes in ([None] * 4, [{"method": "ngram", "adaptive": False}] * 4, [oracle, None, None, {"method": "ngram"}]):
        assert run(llm, PARAMS, wishes, sums) == plain


def drafts_of(llm: LLM, wish: dict[str, Any], prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    """What is proposed after each text, and the texts that came."""
    watch = Watch(llm, wish)
    outs = llm.generate(prompts, params, speculation=wish)
    assert all(out.speculation.failure is None for out in outs)
    proposals = {}
    for tokens, tree in watch.proposals:
        if tree is not None:
            drafted = (tree.tokens, tree.parents, [round(score, 5) for score in tree.scores or []])
            assert proposals.setdefault(tuple(tokens), drafted) == drafted
    return proposals, [out.outputs[0].token_ids for out in outs]


def head_of(which: str, model: Any) -> tuple[str, Any]:
    """The kind, and a head: one of ours whose drafts depend on all that is kept, or a network with random weights."""
    toy, _, kind = which.rpartition(" ")
    if not toy:
        return kind, random_head(kind, model)
    return kind, KeepingHead(shape_of(kind, model, confidence_head=True, markov_rank=8))


DRAFTED_AROUND: dict[str, list[dict[str, Any]]] = {
    "llama": [AROUND["chunks"], {"kernels": "stepped", "max_prefill_chunk": 16}], "mistral": [AROUND["preempted"]],
    "native": [AROUND["swapped"]], "native int8": [AROUND[name] for name in ("chunks", "preempted", "swapped")]}
EVERYWHERE = ("toy eagle3", "dspark")
FIRST = [*itertools.product(KINDS, EVERYWHERE), *(("native int8", which) for which in HEADS if which != "dspark")]
REST = [pair for pair in itertools.product(KINDS, ("toy dspark", *HEADS)) if pair not in FIRST]


@pytest.mark.parametrize(("name", "which"), [
    *(pytest.param(*pair, marks=NATIVE if "native" in pair[0] else ()) for pair in FIRST),
    *(pytest.param(*pair, marks=(pytest.mark.full, *((NATIVE,) if "native" in pair[0] else ()))) for pair in REST)])
def test_drafts_after_a_prefix_hit_are_those_of_a_cold_start(name: str, which: str) -> None:
    """And so they are after prompts in chunks, preemption and swaps."""
    model = model_of(name)
    kind, head = head_of(which, model)
    wish = {"method": kind, "k": 3, "adaptive": False}
    params = PARAMS[:1] * 4

    def made(**options: Any) -> LLM:
        return tiny_llm(model, trained={"it": head}, **options)

    cold, texts = drafts_of(made(enable_prefix_caching=False), wish, PROMPTS, params)
    assert len(cold) > 30
    warm_llm = made()
    for _ in range(2):
        warm, again = drafts_of(warm_llm, wish, PROMPTS, params)
        assert again == texts and warm == cold
    assert warm_llm.engine.cache.usage().hits > 0
    for around in DRAFTED_AROUND[name]:
        # The threshold, which nothing is below, leaves the drafts to the host where a device could make them.
        moved, again = drafts_of(made(**around), wish | {"min_confidence": 1e-9}, PROMPTS, params)
        assert again == texts
        assert all(cold[text] == draft for text, draft in moved.items() if text in cold)
        assert len(moved.keys() & cold.keys()) > 30


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
@pytest.mark.parametrize("name", ["llama", pytest.param("native int8", marks=NATIVE)])
def test_a_head_that_is_right_is_accepted(name: str, kind: str) -> None:
    model = model_of(name)
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(PROMPTS, PARAMS, speculation=None)]
    texts = [prompt + text for prompt, text in zip(PROMPTS, plain)]
    for wrong, least in ((0, 4.0), (3, 2.4)):
        llm = tiny_llm(model, trained={"toy": KnowingHead(shape_of(kind, model), texts, wrong)})
        for adaptive in (False, True):
            wish = {"method": kind, "head": "toy", "k": 4, "adaptive": adaptive}
            outs = llm.generate(PROMPTS, PARAMS, speculation=wish)
            assert [out.outputs[0].token_ids for out in outs] == plain
            stats = [out.speculation for out in outs]
            assert all(one is not None and one.failure is None for one in stats)
            if not adaptive:
                assert min(one.mean_accepted_length for one in stats if one is not None) >= least


def test_heads_that_do_not_fit_or_are_not_there_are_refused() -> None:
    model = tiny_model()
    for wrong, said in (({"hidden_size": 64}, "hidden_size 64"), ({"vocab_size": 500}, "vocab_size 500"),
                        ({"taps": (9,)}, "layer 9")):
        config = shape_of("dspark", model, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ModelFormatError, match=said):
            tiny_llm(model, trained={"toy": KeepingHead(config)})
    llm = tiny_llm(model, trained={"a": KeepingHead(shape_of("dspark", model))})
    for wish, said in (({"method": "dspark", "head": "b"}, r"'b' is not loaded.*heads=.*Loaded: a \(dspark\)"),
                       ({"method": "eagle3", "head": "a"}, "of the kind 'dspark'"),
                       ({"method": "eagle3"}, "needs 'head'"),
                       ({"method": "cascade", "drafter": "ngram", "by": "dspark"}, "its own tokens alone")):
        with pytest.raises(RequestError, match=said):
            llm.generate([[1, 2, 3]], speculation=wish)
    assert llm.generate([[1, 2, 3]], speculation={"method": "dspark", "branches": 2})[0].error is None


def test_heads_are_loaded_from_their_folders(tmp_path: Path) -> None:
    model = tiny_model()
    config = head_config("dspark", model)
    write_head(tmp_path / "dspark", config, random_tensors(config), storage="float32")
    place = str(tmp_path / "dspark")
    wish = {"method": "merge", "drafters": ["ngram", {"method": "dspark", "head": place}]}
    assert heads_named(wish) == heads_named([wish, {"method": "eagle3"}, None]) == [place]
    assert heads_named(parse_speculation(wish)) == [place] and heads_named("dspark") == []
    heads = load_heads({place: head_folder(place)}, model, None, EngineOptions.of(heads=[place]))
    own = drafts_of(tiny_llm(model, trained=heads), {"method": "dspark", "head": place, "adaptive": False, "k": 4},
                    PROMPTS[:2], PARAMS[:2])
    memory = {"it": random_head("dspark", model)}
    assert own == drafts_of(tiny_llm(model, trained=memory), {"method": "dspark", "adaptive": False, "k": 4},
                            PROMPTS[:2], PARAMS[:2])
    with pytest.raises(ModelNotFoundError, match="no trained head"):
        build_engine(EngineOptions.of(speculation={"method": "dspark", "head": str(tmp_path / "none")}))
    with pytest.raises(ConfigError, match="heads must be a list"):
        build_engine(EngineOptions.of(heads=place))
