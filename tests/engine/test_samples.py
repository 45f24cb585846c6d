"""n > 1: samples share the prompt's blocks and differ only by their noise."""

from __future__ import annotations

import pytest

from engine.tiny import tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.sampling.noise import sample_seed

PROMPT = [(i * 5 + 3) % 97 for i in range(29)]


def params(**more: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_blocks", [400, 14])
@pytest.mark.parametrize("max_num_seqs", [40, 2])
def test_each_sample_is_the_request_with_its_own_seed(kv_blocks: int, max_num_seqs: int) -> None:
    llm = tiny_llm(kv_blocks=kv_blocks, max_num_seqs=max_num_seqs, max_model_len=80)
    out = llm.generate([PROMPT], params(n=5))[0]
    assert [c.index for c in out.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(c.token_ids) for c in out.outputs}) == 5
    for completion in out.outputs:
        assert completion.seed == sample_seed(7, completion.index)
        alone = llm.generate([PROMPT], params(seed=completion.seed))[0]
        assert alone.outputs[0].token_ids == completion.token_ids
    llm.engine.cache.check([])


def test_samples_share_the_prompt_and_copy_on_write() -> None:
    llm = tiny_llm(enable_prefix_caching=False)
    engine = llm.engine
    engine.add(PROMPT, params(n=4))
    engine.step()
    seqs = list(engine.scheduler.running)
    assert len(seqs) == 4
    tables = [seq.allocation.blocks[0] for seq in seqs]
    whole = len(PROMPT) // engine.config.block_size
    assert all(table[:whole] == tables[0][:whole] for table in tables)
    assert all(engine.cache.pools[0].refs[block] == 4 for block in tables[0][:whole])
    engine.step()
    tables = [seq.allocation.blocks[0] for seq in seqs]
    assert all(table[:whole] == tables[0][:whole] for table in tables), "the full blocks stay shared"
    assert len({table[whole] for table in tables}) == 4, "the block being written is each sample's own"
    engine.cache.check([seq.allocation for seq in seqs])


def test_greedy_samples_are_all_alike() -> None:
    out = tiny_llm().generate([PROMPT], params(n=3, temperature=0.0))[0]
    assert len({tuple(c.token_ids) for c in out.outputs}) == 1


def test_a_request_without_a_seed_gets_one_that_reproduces_it() -> None:
    llm = tiny_llm()
    out = llm.generate([PROMPT], params(seed=None))[0]
    again = llm.generate([PROMPT], params(seed=out.seed))[0]
    assert out.outputs[0].token_ids == again.outputs[0].token_ids


def test_resubmitting_a_partial_output_goes_on_identically() -> None:
    """Noise is keyed by absolute position, so a continued prompt continues the text."""
    llm = tiny_llm()
    whole = llm.generate([PROMPT], params(max_tokens=20))[0].outputs[0].token_ids
    rest = llm.generate([PROMPT + whole[:9]], params(max_tokens=11))[0].outputs[0].token_ids
    assert whole[9:] == rest


def test_max_tokens_none_fills_the_context() -> None:
    llm = tiny_llm(tiny_model(max_position_embeddings=64))
    out = llm.generate([PROMPT], params(max_tokens=None))[0]
    assert len(out.outputs[0].token_ids) == 64 - len(PROMPT)
    assert out.outputs[0].finish_reason == "length"
