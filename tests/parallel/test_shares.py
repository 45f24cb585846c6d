"""What each rank holds of a model, and what becomes of one whose ranks fail."""

from __future__ import annotations

import gc
import logging
import signal
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.test_equality_matrix import PROMPT
from engine.tiny import RandomWeights, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.config import EngineOptions, check
from paceline.engine.drafting.models import LoadedModel
from paceline.engine.parallel.calls import Share
from paceline.engine.parallel.leader import Leader
from paceline.engine.parallel.together import ThreadFollowers, together
from paceline.errors import ConfigError, ParallelError, RequestError
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.cpu import load as native_library
from paceline.kernels.reference import ReferenceKernels
from paceline.models.layers import load_experts
from paceline.models.packing import PackingWeights
from paceline.models.registry import build
from paceline.models.shard import Shard, check_shares
from paceline.parallel.communicator import Alone
from parallel.ranks import SharedWeights, builder, shape_of, shared_model


class Rank(Alone):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def shards(size: int) -> list[Shard]:
    return [Shard(Rank(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("total", [4, 7, 97, 128, 49152, 100])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_spans_are_all_there_is_and_as_even_as_can_be(total: int, size: int) -> None:
    spans = shards(size)[0].spans(total)
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
    widths = shards(size)[0].widths(total)
    assert min(widths) > 0 and max(widths) - min(widths) <= (32 if total % 32 == 0 else 1)


@pytest.mark.parametrize(("heads", "keys", "size", "own"), [
    (8, 4, 2, [(0, 4, 0, 2), (4, 4, 2, 2)]),
    (4, 2, 4, [(0, 1, 0, 1), (1, 1, 0, 1), (2, 1, 1, 1), (3, 1, 1, 1)]),
    (4, 4, 4, [(rank, 1, rank, 1) for rank in range(4)]),
    (4, 1, 2, [(0, 2, 0, 1), (2, 2, 0, 1)]),
    (9, 3, 2, [(0, 9, 0, 3)] * 2),  # not to be divided: everybody holds all of them
    (12, 3, 2, [(0, 12, 0, 3)] * 2)])  # nor are whole groups
def test_heads_are_split_by_groups_or_held_by_all(heads: int, keys: int, size: int,
                                                  own: list[tuple[int, ...]]) -> None:
    shape = shape_of("llama", num_attention_heads=heads, num_key_value_heads=keys, head_dim=8)
    shares = [shard.heads(shape) for shard in shards(size)]
    assert [(share.first, share.query, share.first_keys, share.keys) for share in shares] == own


def test_each_rank_has_its_share_of_weights_and_cache() -> None:
    whole = tiny_model("llama")
    shares = [builder("llama")(shard) for shard in shards(2)]

    def size(model: Any) -> int:
        block = model.blocks[0]
        return sum(linear.weight.numel() for linear in [*block.attention.linears(), *block.mlp.linears(), model.head])

    assert [size(share) for share in shares] == [size(whole) - size(shares[1]), size(shares[1])]
    assert all(2 * share.cache_groups[0].kv_heads == whole.cache_groups[0].kv_heads for share in shares)
    experts = [set(builder("qwen3_moe")(shard).blocks[0].mlp.experts) for shard in shards(2)]  # type: ignore[attr-defined]
    assert experts == [{0, 1}, {2, 3, 4}]


def test_each_rank_has_as_many_experts() -> None:
    """Of 96 all have 48, which are not whole units of 32 as rows are: one rank would hold twice the other's."""
    held = [load_experts(SharedWeights(shard), 96, lambda _, index: index)  # type: ignore[arg-type, return-value]
            for shard in shards(2)]
    assert [list(experts) for experts in held] == [list(range(48)), list(range(48, 96))]


def test_more_ranks_than_heads_are_refused_and_uneven_ones_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="5 is more than this model's 4 attention heads: lower it to 4"):
        check_shares(shape_of("llama"), 5)
    with caplog.at_level(logging.WARNING):
        check_shares(shape_of("llama"), 4)
        assert not caplog.records
        check_shares(shape_of("llama"), 3)
    assert "every rank holds" in caplog.text


@pytest.mark.parametrize(("options", "said"), [
    ({"tensor_parallel_size": 0}, "whole number from 1"), ({"tensor_parallel_size": "2"}, "whole number from 1"),
    ({"tensor_parallel_size": True}, "whole number from 1"),
    ({"tensor_parallel_address": "a:1"}, "of no use with tensor_parallel_size=1")])
def test_what_cannot_be_is_said_before_anything_is_read(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(EngineOptions.of(**options))


def test_methods_on_the_models_own_cache_draft_and_others_are_refused() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    want = tiny_llm(tiny_model("llama")).generate([PROMPT], params)[0].outputs[0].token_ids
    llm = tiny_llm(shared_model("llama", 2))
    for method in ("skip", "exit", "ngram", "suffix", "lookahead"):
        out = llm.generate([PROMPT], params, speculation=method)[0]
        assert out.outputs[0].token_ids == want, method
        assert out.speculation is not None and out.speculation.failure is None, method
    small = LoadedModel(tiny_model("llama", num_hidden_layers=1), None, ReferenceKernels())
    llm.engine.draft_models.add("small", small)  # which rank 0 has by itself
    assert llm.generate([PROMPT], params, speculation={"method": "draft", "model": "small"})[0].outputs[
        0].token_ids == want
    with pytest.raises(RequestError, match="precision"):
        llm.generate([PROMPT], params, speculation="precision")


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "gemma3", "gpt2", "olmo2"])
def test_results_that_are_added_up_give_the_same_texts(name: str) -> None:
    """Without deterministic mode: another order of sums, so up to ties."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    want, got = ([out.outputs[0].token_ids for out in tiny_llm(model, deterministic=False).generate(
        [PROMPT, PROMPT[:9]], params)] for model in (tiny_model(name), shared_model(name, 2, exact=False)))
    assert got == want


@pytest.mark.skipif(native_library() is None, reason="the native library is not built")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_packed_weights_are_split_to_the_bit(name: str) -> None:
    shape = shape_of(name, intermediate_size=64, hidden_size=64, moe_intermediate_size=32, tie_word_embeddings=True)

    def packed(shard: Shard | None = None) -> Any:
        weights = RandomWeights() if shard is None else SharedWeights(shard)
        return build(shape, PackingWeights(weights), shape.max_position_embeddings)

    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    whole = packed()
    shared = together(2, packed, lambda: NativeKernels(1), torch.device("cpu"))
    want, got = (tiny_llm(model, kernels="native").generate([PROMPT], params)[0].outputs[0].token_ids
                 for model in (whole, shared))
    assert shared.bits == whole.bits == 8
    assert got == want


def test_a_rank_that_fails_is_named_and_nobody_waits() -> None:
    class Faulty(ReferenceKernels):
        def head(self, *args: Any, **more: Any) -> torch.Tensor:
            raise ValueError("no such thing")

    def share(ranks: Any) -> Share:
        return Share(builder("llama")(Shard(ranks)), Faulty(), torch.device("cpu"))

    followers = ThreadFollowers(2, share, patience=30.0)
    model = Leader(builder("llama")(Shard(followers.ranks)), followers)
    llm = tiny_llm(model)
    for _ in range(2):
        with pytest.raises(ParallelError, match=r"Rank 1 of 2 failed \(ValueError: no such thing\)"):
            raise llm.generate([PROMPT], SamplingParams(max_tokens=2))[0].error or AssertionError("no error")
    assert llm.engine.model.lost is not None
    llm.engine.cache.check([])


def test_an_interrupt_waits_until_all_ranks_have_made_a_call() -> None:
    """So that the next request finds them in step."""
    model = shared_model("llama", 2)
    llm, params = tiny_llm(model), SamplingParams(max_tokens=4, temperature=0.0)
    want = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    forward = model.share.forward

    def interrupted(*args: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return forward(*args)

    model.share.forward = interrupted  # type: ignore[method-assign]
    # A shell that starts something in the background has it ignore Ctrl-C, these tests among it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT], params)
    finally:
        signal.signal(signal.SIGINT, before)
    model.share.forward = forward  # type: ignore[method-assign]
    assert model.lost is None
    assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == want


@pytest.mark.parametrize(("params", "options"), [
    ({"n": 3, "seed": 4}, {}), ({"beam_width": 3, "temperature": 0.0, "seed": 4}, {}),
    ({"seed": 4}, {"kv_dtype": "fp8"}), ({"prompt_logprobs": 2, "logprobs": 2, "seed": 4}, {"max_prefill_chunk": 5})])
def test_whatever_a_request_asks_for_is_the_same(params: dict[str, Any], options: dict[str, Any]) -> None:
    asked = SamplingParams(max_tokens=8, ignore_eos=True, **{"temperature": 0.9} | params)
    one, two = (tiny_llm(model, **options).generate([PROMPT, PROMPT[:9]], asked)
                for model in (tiny_model("llama"), shared_model("llama", 2)))
    for left, right in zip(one, two, strict=True):
        assert right.error is None
        assert left.outputs == right.outputs and left.prompt_logprobs == right.prompt_logprobs


def test_an_engine_that_is_gone_takes_its_ranks_along() -> None:
    for end in ("collected", "closed"):
        llm = tiny_llm(shared_model("llama", 3))
        engine, threads = llm.engine, llm.engine.model._followers.threads  # type: ignore[attr-defined]
        assert len(threads) == 2 and all(thread.is_alive() for thread in threads)
        if end == "closed":
            engine.close()
            with pytest.raises(ParallelError, match="was closed"):
                raise llm.generate([PROMPT], SamplingParams(max_tokens=2))[0].error or AssertionError("no error")
        del llm, engine
        gc.collect()
        for thread in threads:
            thread.join(10.0)
        assert not any(thread.is_alive() for thread in threads), end


def test_on_a_card_sums_are_cut_as_those_of_the_whole_matrix() -> None:
    """Long rows of few outputs are summed in pieces: how many outputs there are is the whole matrix's affair."""
    pytest.importorskip("triton")
    from paceline.kernels.triton.backend import TritonKernels

    shape = shape_of("llama", hidden_size=2200, head_dim=8, num_hidden_layers=1, intermediate_size=64)
    whole, part = (build(shape, SharedWeights(shard), 64).blocks[0].attention.out.weight  # type: ignore[attr-defined]
                   for shard in (Shard(), *shards(2)[:1]))
    kernels = TritonKernels(True, torch.device("cpu"))
    assert part.shape[0] < 2048 < whole.shape[0]
    x = torch.zeros(1, 4096, dtype=torch.bfloat16)
    assert kernels._how(x, part).piece == kernels._how(x, whole).piece
    assert kernels._how(x, part.clone()).piece != kernels._how(x, whole).piece, "or this proves nothing"
