"""Blocks of one engine's prefix cache in another's: the same texts as without, of the right text and scope, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.tiny import SHAPES, VOCAB, RandomWeights, tiny_engine, tiny_model
from engine.toy_heads import KeepingHead, shape_of
from paceline import SamplingParams
from paceline.cache.block_bytes import PlaneFormat
from paceline.engine.core import Engine
from paceline.engine.exchange import PrefixBlocks, joined
from paceline.errors import TransferError
from paceline.kernels import cpu
from paceline.models.native import NativeDecoder
from paceline.request import Tenant, scope_of
from speculation.model_drafting import drafting_llm, shape

PROMPT = [(i * 17 + 5) % VOCAB for i in range(61)]
NEW = 12
NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
NOBODY = Tenant()


def finish(engine: Engine, name: str) -> Any:
    while engine.has_work:
        engine.step()
    return engine.take(name)


def ask(engine: Engine, prompt: list[int], wish: Any = None, tenant: Tenant = NOBODY, **params: Any) -> Any:
    asked = SamplingParams(**{"max_tokens": NEW, "temperature": 0.8, "ignore_eos": True, "seed": 3} | params)
    record = finish(engine, engine.add(prompt, asked, speculation=wish, tenant=tenant))
    assert record.error is None
    return record


def text(record: Any) -> list[int]:
    return list(record.snapshot().outputs[0].token_ids)


def prefill(engine: Engine, prompt: list[int], tenant: Tenant = NOBODY, **params: Any) -> None:
    ask(engine, prompt, tenant=tenant, max_tokens=1, **params)


def exported(engine: Engine, prompt: list[int], scope: str = "", most_bytes: int = 1 << 20) -> PrefixBlocks:
    parts: list[PrefixBlocks] = []
    first = 0
    while True:
        part = engine.exchange.export_prefix(prompt, scope, first, most_bytes=most_bytes)
        assert part is not None
        if not any(part.pieces):
            return joined(parts or [part])
        parts.append(part)
        first = 1 + max(piece.place for own in part.pieces for piece in own)


def hand_over(source: Engine, target: Engine, prompt: list[int], scope: str = "", most_bytes: int = 1 << 20) -> int:
    count = 0
    for part in exported(source, prompt, scope, most_bytes).parts(most_bytes):
        taken = target.exchange.import_prefix(part, prompt, scope)
        assert taken is not None
        count += taken
    target.cache.check([])
    source.cache.check([])
    return count


ALWAYS = ("llama", "mistral", "qwen2", "deepseek_v3", "gemma3", "shared_keys", "mixtral")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full])
                                  for name in SHAPES])
def test_texts_are_the_same_for_every_architecture(name: str) -> None:
    """Whole attention, windows, latents, layers that read others' keys; prompts that end anywhere in a block."""
    model = tiny_model(name)
    source, alone = tiny_engine(model), tiny_engine(model)
    for length in (56, 57, 61) if name == "llama" else (61,):
        prompt = PROMPT[:length]
        target = tiny_engine(model, speculation="ngram", max_num_seqs=3)
        prefill(source, prompt)
        assert hand_over(source, target, prompt, most_bytes=1 if length == 61 else 1 << 20)
        record = ask(target, prompt, wish="ngram")
        assert record.metrics.cached_tokens == (length - 1) // 8 * 8
        assert text(record) == text(ask(alone, prompt))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8"])
def test_caches_of_every_number_format(dtype: str) -> None:
    model = tiny_model("qwen2")
    source, target, alone = (tiny_engine(model, kv_dtype=dtype, kernels="reference") for _ in range(3))
    prefill(source, PROMPT)
    assert hand_over(source, target, PROMPT)
    record = ask(target, PROMPT)
    assert record.metrics.cached_tokens == 56 and text(record) == text(ask(alone, PROMPT))


@NATIVE
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_native_caches_with_their_scales_and_other_threads(dtype: str) -> None:
    codes = {"int8": torch.int8, "float16": torch.float16}[dtype]
    source, target, alone = (
        tiny_engine(NativeDecoder(shape("llama"), RandomWeights(), 512, threads=threads, kv_dtype=codes),
                    kv_dtype=dtype, kernels="native") for threads in (2, 1, 1))
    prefill(source, PROMPT)
    assert hand_over(source, target, PROMPT)
    record = ask(target, PROMPT)
    assert record.metrics.cached_tokens == 56 and text(record) == text(ask(alone, PROMPT))


@pytest.mark.parametrize("wish", [
    "suffix", "lookahead", {"method": "skip", "skip": [1]}, {"method": "draft", "model": "other"},
    # Under this rule a text hangs on where cycles begin: not on what steps take here.
    {"method": "draft", "model": "other", "verify": "rejection", "k": 3, "adaptive": False}])
def test_every_kind_of_drafter_goes_on_after_blocks_that_came(wish: Any) -> None:
    """A model that drafts with a cache of its own reads the prompt by itself."""
    source, target, alone = (drafting_llm("llama").engine for _ in range(3))
    prefill(source, PROMPT)
    assert hand_over(source, target, PROMPT)
    record = ask(target, PROMPT, wish=wish)
    assert record.metrics.cached_tokens == 56 and text(record) == text(ask(alone, PROMPT, wish=wish))


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_what_heads_keep_travels_with_the_blocks(kind: str) -> None:
    """A head that drafts from all that was kept of the text drafts what it would have."""
    model = tiny_model()
    source, target, alone = (tiny_engine(model, trained={"own": KeepingHead(shape_of(kind, model))}) for _ in range(3))
    wish = {"method": kind, "head": "own", "k": 4, "adaptive": False}
    prefill(source, PROMPT)
    assert hand_over(source, target, PROMPT)
    record, other = ask(target, PROMPT, wish=wish), ask(alone, PROMPT, wish=wish)
    assert record.metrics.cached_tokens == 56
    assert text(record) == text(other)
    assert record.speculation.as_dict()["drafted"] == other.speculation.as_dict()["drafted"] > 0
    assert record.speculation.as_dict()["accepted"] == other.speculation.as_dict()["accepted"]


def test_workers_may_have_other_heads_and_see_nothing_of_other_texts() -> None:
    model = tiny_model()
    plain, source = tiny_engine(model), tiny_engine(model, trained={"other": KeepingHead(shape_of("eagle3", model))})
    for one in (plain, source):
        target = tiny_engine(model, trained={"own": KeepingHead(shape_of("eagle3", model))}, kv_blocks=10)
        ask(target, [5] * 68)  # every block has held another text
        prefill(one, PROMPT)
        assert hand_over(one, target, PROMPT) == 7
        kept = target.storage.extra["own.sums"].view(-1, 8, 32)
        assert not kept[[node.blocks[0] for node in target.cache.prefix.match(PROMPT, "", 7)]].any()
        record = ask(target, PROMPT, wish={"method": "eagle3", "head": "own", "k": 3})
        assert record.metrics.cached_tokens == 56 and text(record) == text(ask(plain, PROMPT))


def test_a_head_that_was_lost_sends_nothing() -> None:
    model = tiny_model()
    source, target = (tiny_engine(model, trained={"own": KeepingHead(shape_of("eagle3", model))}) for _ in range(2))
    prefill(source, PROMPT)
    source.heads.lost["own"] = RuntimeError("it broke")
    assert [one.name for one in exported(source, PROMPT).planes[0] if one.extra] == []
    assert hand_over(source, target, PROMPT) == 7


@pytest.mark.parametrize(("kernels", "ahead"), [("reference", False), ("reference", True), ("stepped", True)])
def test_while_others_run_on_both_sides(kernels: str, ahead: bool) -> None:
    """Blocks come and go between any two steps, in flight or not, and nobody's text changes."""
    model = tiny_model("qwen2")
    options: dict[str, Any] = {"kernels": kernels, "schedule_ahead": ahead, "max_prefill_chunk": 16, "kv_blocks": 60}
    source, target, alone = (tiny_engine(model, **options) for _ in range(3))
    others = [[(i * step + 3) % VOCAB for i in range(30)] for step in (2, 7)]
    asked = SamplingParams(max_tokens=14, temperature=0.8, ignore_eos=True, seed=3)
    names = {id(engine): [engine.add(other, asked, speculation="ngram") for other in others]
             for engine in (source, target)}
    name = source.add(PROMPT, replace(asked, max_tokens=1))
    while source.scheduler.sequences(name):
        source.step()
        target.step()
    handed, first = 0, 0
    while True:
        part = source.exchange.export_prefix(PROMPT, "", first, most_bytes=1)
        target.step()
        if part is not None and not any(part.pieces):
            break
        if part is not None:
            first = 1 + max(piece.place for own in part.pieces for piece in own)
            while (taken := target.exchange.import_prefix(part, PROMPT, "")) is None:
                target.step()
            handed += taken
        source.step()
    assert handed >= 7
    record = ask(target, PROMPT)
    assert record.metrics.cached_tokens == 56 and text(record) == text(ask(alone, PROMPT))
    for engine in (source, target):
        for one, other in zip(names[id(engine)], others):
            assert text(finish(engine, one)) == text(ask(alone, other, max_tokens=14))
        engine.cache.check([])


def test_many_prompts_by_random_turns_leave_the_books_in_order() -> None:
    """A small cache on either side: what had to make room is computed, here or there; host blocks included."""
    model = tiny_model("qwen2")
    source, target = (tiny_engine(model, kv_blocks=14, host_cache=0.001) for _ in range(2))
    alone = tiny_engine(model)
    for turn in range(14):
        prompt = PROMPT[:8 * (turn % 3)] + [(turn * turn + 13 * i) % VOCAB for i in range(20 + 2 * turn)]
        prefill(source, prompt)
        hand_over(source, target, prompt, most_bytes=1)
        assert text(ask(target, prompt, max_tokens=4)) == text(ask(alone, prompt, max_tokens=4)), turn
        target.cache.check([])


# ------------------------------------------------------------------ whose blocks they are

@pytest.mark.parametrize(("tenant", "salt"), [(Tenant("her"), ""), (NOBODY, "pepper"), (Tenant("her"), "pepper")])
def test_blocks_of_a_scope_are_found_in_it_alone(tenant: Tenant, salt: str) -> None:
    model = tiny_model()
    source, target = tiny_engine(model), tiny_engine(model)
    scope = scope_of(tenant, salt)
    prefill(source, PROMPT, tenant, cache_salt=salt)
    assert not any(exported(source, PROMPT).pieces)  # nobody's
    assert not any(exported(source, PROMPT, scope_of(Tenant("him"), salt)).pieces)
    blocks = exported(source, PROMPT, scope)
    for wrong in ("", scope_of(Tenant("him"), salt), scope_of(tenant, salt + "x")):
        with pytest.raises(TransferError, match="another text"):
            target.exchange.import_prefix(blocks, PROMPT, wrong)
    assert hand_over(source, target, PROMPT, scope) == 7
    assert ask(target, PROMPT).metrics.cached_tokens == 0
    assert ask(target, PROMPT, tenant=Tenant("him"), cache_salt=salt).metrics.cached_tokens == 0
    assert ask(target, PROMPT, tenant=tenant, cache_salt=salt).metrics.cached_tokens == 56


# ------------------------------------------------------------------ what does not fit

def blocks_of(**options: Any) -> PrefixBlocks:
    source = tiny_engine(tiny_model(), **options)
    prefill(source, PROMPT)
    return exported(source, PROMPT)


@pytest.mark.parametrize(("options", "said"), [
    ({"block_size": 16}, "block_size"), ({"kv_dtype": "float16"}, "kv_dtype is 'float16' there and 'float32' here"),
    ({"deterministic": False}, "deterministic"),
])
def test_other_options_are_told_and_nothing_is_taken_in(options: dict[str, Any], said: str) -> None:
    target = tiny_engine(tiny_model())
    with pytest.raises(TransferError, match=said):
        target.exchange.import_prefix(blocks_of(**options), PROMPT, "")
    assert not target.cache.prefix.nodes()


def test_another_model_is_told() -> None:
    target, blocks = tiny_engine(tiny_model()), blocks_of()
    with pytest.raises(TransferError, match="model is 'x' there and 'tiny' here"):
        target.exchange.import_prefix(replace(blocks, facts=blocks.facts | {"model": "x"}), PROMPT, "")
    for fact in ("processor", "torch", "version"):  # whose products may be added up in another order
        with pytest.raises(TransferError, match=f"{fact} is 'x' there"):
            target.exchange.import_prefix(replace(blocks, facts=blocks.facts | {fact: "x"}), PROMPT, "")
    target.exchange.facts["model"] = ""
    with pytest.raises(TransferError, match="no revision"):
        target.exchange.import_prefix(blocks, PROMPT, "")


def test_a_cache_of_which_others_hold_a_part_is_not_handed_over() -> None:
    target, blocks = tiny_engine(tiny_model()), blocks_of()
    target.storage.mirror = object()  # type: ignore[assignment]
    for ask_for in (lambda: target.exchange.export_prefix(PROMPT, ""),
                    lambda: target.exchange.import_prefix(blocks, PROMPT, "")):
        with pytest.raises(TransferError, match="tensor parallel"):
            ask_for()


def test_blocks_that_are_not_what_they_say_are_refused() -> None:
    target, blocks = tiny_engine(tiny_model()), blocks_of()
    (rows,), (pieces,), (planes,) = blocks.data, blocks.pieces, blocks.planes
    for wrong in (
            replace(blocks, data=(rows[:-1],)), replace(blocks, data=(rows[:, :-1],)),
            replace(blocks, data=(rows.to(torch.int16),)), replace(blocks, pieces=((pieces[0], *pieces[:-1]),)),
            replace(blocks, pieces=((*pieces[:-1], pieces[-1]._replace(place=99)),)),
            replace(blocks, pieces=((*pieces[:-1], pieces[-1]._replace(group=1)),)),
            replace(blocks, planes=(planes[1:],)), replace(blocks, planes=()),
            replace(blocks, planes=((*planes, PlaneFormat("x", "uint8", 4, False)),)),
            replace(blocks, tokens=(1, *blocks.tokens[1:]))):
        with pytest.raises(TransferError):
            target.exchange.import_prefix(wrong, PROMPT, "")
    assert not target.cache.prefix.nodes()
    target.cache.check([])


def test_a_write_that_fails_leaves_no_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    target, blocks = tiny_engine(tiny_model()), blocks_of()

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(target.exchange._bytes, "write", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        target.exchange.import_prefix(blocks, PROMPT, "")
    target.cache.check([])
    assert not target.cache.prefix.nodes() and target.cache.usage().free == target.cache.usage().total


def test_engines_without_a_prefix_cache_hand_over_nothing_and_take_nothing() -> None:
    model = tiny_model()
    off = tiny_engine(model, enable_prefix_caching=False)
    prefill(off, PROMPT)
    assert not any(exported(off, PROMPT).pieces)
    assert off.exchange.import_prefix(blocks_of(), PROMPT, "") == 0
    off.cache.check([])


def test_requests_that_end_while_the_cache_catches_up_hear_of_it() -> None:
    """A laid-out step that breaks when an exchange has it run costs its own requests, who are told in the next pass."""
    engine = tiny_engine(tiny_model(), schedule_ahead=True)
    name = engine.add(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0))
    for _ in range(3):
        engine.step()
    assert not engine.executor.underway

    def broken(*_: Any) -> None:
        raise RuntimeError("it broke")

    engine.runner.run_batch = broken  # type: ignore[assignment, method-assign]
    assert engine.exchange.export_prefix(PROMPT, "") is None
    assert engine.has_work
    (record,) = engine.step()
    assert record.request.id == name and record.error is not None and not record.open
    engine.cache.check([])


def test_what_comes_is_written_after_a_step_that_waits() -> None:
    """A step that is laid out still writes to the blocks of who has left meanwhile, which are the next to be taken."""
    target, alone, blocks = tiny_engine(tiny_model(), schedule_ahead=True), tiny_engine(tiny_model()), blocks_of()
    asked = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    names = [target.add([token] * 13, asked) for token in (3, 4)]
    for _ in range(5):
        target.step()
    assert not target.executor.underway
    target.cancel(names[1])
    assert target.exchange.import_prefix(blocks, PROMPT, "") == 7
    record = ask(target, PROMPT)
    assert record.metrics.cached_tokens == 56 and text(record) == text(ask(alone, PROMPT))


def test_what_goes_is_read_after_accepted_drafts_have_moved() -> None:
    """Blocks may be whole by drafts of a tree, whose path moves into place with the next step only."""
    model = tiny_model()
    alone = tiny_engine(model)
    want = text(ask(alone, PROMPT[:30], temperature=0.0, max_tokens=40))
    source = tiny_engine(model)
    wish = {"method": "oracle", "k": 4, "branches": 3, "tokens": want}
    asked = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    name = source.add(PROMPT[:30], asked, speculation=wish)
    waited = 0
    while source.scheduler.sequences(name):
        source.step()
        (seq,) = source.scheduler.sequences(name) or (None,)
        if seq is None or not source.scheduler._moves:
            continue
        waited += 1
        so_far, target = list(seq.tokens), tiny_engine(model)
        for part in exported(source, so_far).parts():
            target.exchange.import_prefix(part, so_far, "")
        record = ask(target, so_far, temperature=0.0, max_tokens=4)
        assert record.metrics.cached_tokens >= 24
        assert text(record) == want[len(so_far) - 30:][:4] or len(so_far) > 66
    assert waited > 2


@NATIVE
def test_what_heads_have_yet_to_take_up_is_handed_over_too() -> None:
    """Rows of plain steps wait for a head of native kernels; whoever reads blocks has them taken up first."""
    def engine() -> Engine:
        model = NativeDecoder(shape("llama"), RandomWeights(), 512, threads=1, kv_dtype=torch.int8)
        return tiny_engine(model, trained={"own": KeepingHead(shape_of("dspark", model))}, kv_dtype="int8",
                           kernels="native")

    source, target, alone = engine(), engine(), engine()
    told = PROMPT + text(ask(source, PROMPT, max_tokens=8))
    assert source.heads._waiting is not None and source.heads._waiting._count
    assert hand_over(source, target, told) == 8
    prefill(alone, told)
    kept = []
    for one in (target, alone):
        one.heads.settle()
        blocks = [node.blocks[0] for node in one.cache.prefix.match(told, "", 8)]
        kept.append(one.storage.extra["own.sums"].view(-1, 8, 64)[blocks])
    assert kept[0].any(dim=2).all() and torch.equal(*kept)
