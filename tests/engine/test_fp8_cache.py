"""fp8 caches in torch: half a bfloat16 cache's bytes, nearly the same logits, and as exact as any other cache."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from engine.test_equality_matrix import NEW, PROMPT, params, preempt_at, strangers
from engine.tiny import BASE, SHAPES, RandomWeights, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.cache.storage import bytes_per_token
from paceline.config import EngineOptions
from paceline.engine.build import build_engine
from paceline.errors import ConfigError
from paceline.kernels.reference.quantised import LARGEST, quantised
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from speculation.model_drafting import drafting_llm

KERNELS = ("reference", "eager")
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)


@functools.cache
def model() -> Any:
    return tiny_model("qwen2")


def tokens_of(kernels: str, wish: Any = None, company: int = 0, preempt: bool = False, warm: bool = False,
              **options: Any) -> list[int]:
    llm = tiny_llm(model(), kernels=kernels, deterministic=kernels == "reference", kv_dtype="fp8", **options)
    prompts, wanted = strangers(company)
    for _ in range(2 if warm else 1):
        if preempt:
            preempt_at(llm, 0, steps=(1, 4))
        out = llm.generate([PROMPT, *prompts], [params("seeded"), *wanted], speculation=[wish] + [None] * company)[0]
        assert out.error is None
    llm.engine.cache.check([])
    return out.outputs[0].token_ids


@functools.cache
def alone() -> list[int]:
    return tokens_of("reference", enable_prefix_caching=False)


@pytest.mark.parametrize("circumstances", [
    {"company": 5}, {"max_prefill_chunk": 7}, {"preempt": True, "company": 2}, {"warm": True},
    {"wish": {"method": "ngram"}}, {"wish": "skip"}])
def test_tokens_do_not_depend_on_what_happens_around_them(circumstances: dict[str, Any]) -> None:
    assert tokens_of("reference", **circumstances) == alone()


@pytest.mark.parametrize("branches", [1, 3])
def test_accepted_paths_are_moved_with_their_scales(branches: int) -> None:
    script = {"method": "oracle", "k": 4, "branches": branches, "tokens": alone()}
    assert tokens_of("reference", wish=script) == alone()


def test_a_draft_model_may_have_an_fp8_cache_beside_it() -> None:
    wish = {"method": "draft", "model": "same", "k": 3}
    options = {"kv_dtype": "fp8", "kernels": "reference"}
    plain, drafted = (drafting_llm("llama", **options).generate([PROMPT], params("greedy"), speculation=one)[0]
                      for one in (None, wish))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids and len(plain.outputs[0].token_ids) == NEW


@pytest.mark.parametrize("kernels", KERNELS)
def test_scores_are_near_those_of_a_float_cache(kernels: str) -> None:
    wanted = {"deterministic": kernels == "reference", "kernels": kernels}
    calm = build(ModelConfig.from_dict(BASE | SHAPES["llama"]), RandomWeights(gain=0.7), 512)
    scored = [tiny_llm(calm, kv_dtype=dtype, **wanted).generate([PROMPT], SCORED)[0].prompt_logprobs
              for dtype in ("float32", "fp8")]
    exact, rounded = (torch.tensor([one.raw for one in scores[1:]]) for scores in scored)
    deviation = (exact - rounded).abs()
    assert 0 < float(deviation.mean()) < 0.1, "rounded, and not by much"


def test_it_takes_half_the_bytes_of_a_bfloat16_cache_and_the_scales() -> None:
    groups = model().cache_groups
    values = sum(2 * len(group.layers) * group.kv_heads * group.head_dim for group in groups)
    heads = sum(2 * len(group.layers) * group.kv_heads for group in groups)
    assert bytes_per_token(groups, torch.bfloat16) == 2 * values
    assert bytes_per_token(groups, torch.float8_e4m3fn) == values + 4 * heads


@pytest.mark.real_model
def test_on_the_native_path_it_is_refused_with_what_takes_as_little(default_model_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype='fp8'.*kv_dtype='int8'"):
        build_engine(EngineOptions.of(model=str(default_model_path), device="cpu", kv_dtype="fp8", kernels="native"))


@pytest.mark.parametrize("peak", [0.01, 1.0, 3000.0])
def test_a_head_uses_all_of_e4m3(peak: float) -> None:
    """It reaches 448, not 240 as texts that circulate have it: a head's largest value becomes that, and comes back."""
    assert torch.finfo(torch.float8_e4m3fn).max == LARGEST[torch.float8_e4m3fn] == 448.0
    k = peak * torch.tensor([[[0.25, -1.0], [0.0, 1.0]]])
    planes = (torch.zeros(1, 2), torch.zeros(1, 2))
    codes, _ = quantised(k, k, torch.float8_e4m3fn, torch.tensor([0]), planes)
    assert codes.float().tolist() == [[[112.0, -448.0], [0.0, 448.0]]]
    torch.testing.assert_close(codes.float() * planes[0][..., None], k)
