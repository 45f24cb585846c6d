"""What a new prompt finds in the prefix cache, why it finds no more, and why it can never find another's text."""

from __future__ import annotations

import pytest

from paceline.cache.allocation import Allocation
from paceline.cache.manager import CacheManager
from paceline.kernels.groups import NULL_BLOCK, CacheGroup


def make(*kinds: dict[str, int], blocks: int = 33, size: int = 4, **options: object) -> CacheManager:
    groups = [CacheGroup(f"g{i}", (0,), 1, 1, **kind) for i, kind in enumerate(kinds or ({},))]
    return CacheManager(groups, [blocks] * len(groups), size, 8, 16, **options)  # type: ignore[arg-type]


def compute(cache: CacheManager, tokens: list[int], *, salt: str = "") -> Allocation:
    """Open a sequence and bring all of its tokens into the cache."""
    allocation = cache.open(tokens, salt=salt)
    assert allocation is not None
    assert cache.reserve(allocation, allocation.cached, len(tokens)) == []
    cache.commit(allocation, tokens, len(tokens))
    return allocation


def keep(cache: CacheManager, tokens: list[int], **options: str) -> None:
    cache.close(compute(cache, tokens, **options))
    cache.check([])


def found(cache: CacheManager, tokens: list[int], *, salt: str = "", reuse: bool = True) -> tuple[int, str | None]:
    allocation = cache.open(tokens, salt=salt, reuse=reuse)
    assert allocation is not None
    cache.check([allocation])
    cache.close(allocation)
    return allocation.cached, allocation.miss


TEXT = list(range(100, 120))


def test_whole_blocks_are_shared_and_the_last_token_is_always_computed() -> None:
    cache = make()
    keep(cache, TEXT[:14])
    assert found(cache, TEXT[:14]) == (12, None)
    assert found(cache, TEXT[:12]) == (8, None)
    assert found(cache, TEXT[:13]) == (12, None)
    assert cache.usage().hits == 32 and cache.usage().queries == 14 + 14 + 12 + 13


def test_a_running_sequence_shares_its_blocks_at_once() -> None:
    cache = make()
    first = compute(cache, TEXT[:9])
    second = cache.open(TEXT[:9])
    assert second is not None and second.blocks[0] == first.blocks[0][:2]
    assert cache.usage().shared == 2
    cache.check([first, second])


@pytest.mark.parametrize(("prompt", "reason"), [
    (TEXT[:4], "shorter than a block"),
    ([1, 2, 3, 4, 5], "never seen"),
    (TEXT[:12] + [1, 1, 1, 1, 1], "never seen"),
    (TEXT[:2] + [1, 1, 1], "diverged at token 2"),
    (TEXT[:7] + [1, 1, 1], "diverged at token 7"),
    (TEXT[:8] + [1, 1, 1, 1, 1], "diverged at token 8"),
])
def test_a_miss_says_why(prompt: list[int], reason: str) -> None:
    cache = make()
    keep(cache, TEXT[:12])
    assert found(cache, prompt)[1] == reason


def test_a_miss_by_rule_says_which_rule() -> None:
    cache = make()
    keep(cache, TEXT)
    assert found(cache, TEXT, reuse=False) == (0, "prompt_logprobs")
    assert found(make(enable_prefix_caching=False), TEXT) == (0, "disabled")


def test_an_evicted_text_is_remembered_as_evicted_end_first() -> None:
    cache = make(blocks=6)
    keep(cache, TEXT[:13])
    keep(cache, list(range(16)))
    assert cache.usage().evictions == 2
    assert found(cache, TEXT[:13]) == (4, "evicted")


def test_a_salt_separates_texts_and_does_not_tell_about_others() -> None:
    cache = make()
    keep(cache, TEXT, salt="alice")
    assert found(cache, TEXT, salt="bob") == (0, "salt")
    assert found(cache, TEXT) == (0, "never seen")
    assert found(cache, TEXT, salt="alice") == (16, None)


def test_a_hash_collision_never_leaks_another_text() -> None:
    cache = make(hash_function=lambda parent, tokens, salt: 42)
    keep(cache, TEXT)
    stranger = [token + 1 for token in TEXT]
    assert found(cache, stranger)[0] == 0
    keep(cache, stranger)
    assert found(cache, TEXT) == (16, None) and found(cache, stranger) == (16, None)
    assert found(cache, TEXT[4:])[0] == 0, "the same block after another beginning is another entry"
    assert found(cache, TEXT, salt="x")[0] == 0


def test_the_same_block_after_another_beginning_is_not_shared() -> None:
    cache = make()
    keep(cache, TEXT)
    assert found(cache, [1, 2, 3, 4] + TEXT[4:])[0] == 0


def test_a_text_computed_twice_at_once_is_kept_once() -> None:
    cache = make()
    first, second = cache.open(TEXT), cache.open(TEXT)
    assert first is not None and second is not None
    for allocation in (first, second):
        cache.reserve(allocation, 0, len(TEXT))
        cache.commit(allocation, TEXT, len(TEXT))
    assert cache.usage().cached == 5
    cache.check([first, second])


def test_a_window_group_needs_only_the_blocks_in_its_window() -> None:
    cache = make({}, {"window": 5})
    keep(cache, TEXT)
    allocation = cache.open(TEXT)
    assert allocation is not None and allocation.cached == 16
    assert NULL_BLOCK not in allocation.blocks[0]
    assert allocation.blocks[1][:3] == [NULL_BLOCK] * 3 and allocation.blocks[1][3] != NULL_BLOCK
    cache.check([allocation])


def test_all_groups_must_agree_on_the_length() -> None:
    groups = [CacheGroup("full", (0,), 1, 1), CacheGroup("window", (1,), 1, 1, window=5)]
    cache = CacheManager(groups, [33, 6], 4, 8, 16)
    keep(cache, TEXT)
    others = compute(cache, list(range(20)))
    assert cache.pools[0].evictions == 0 and cache.pools[1].evictions == 5
    shared = cache.open(TEXT)
    assert shared is not None and shared.cached == 0 and shared.miss == "evicted"
    cache.check([others, shared])


def test_a_group_with_lookahead_is_shared_only_if_the_next_tokens_agree() -> None:
    cache = make({}, {"lookahead": 1})
    keep(cache, TEXT[:9])
    assert found(cache, TEXT[:8] + [1, 2]) == (4, "diverged at token 8")
    assert found(cache, TEXT[:10]) == (8, None)


def test_a_group_with_lookahead_registers_a_block_once_the_tokens_after_it_are_final() -> None:
    cache = make({"lookahead": 2})
    keep(cache, TEXT[:9])
    assert cache.usage().cached == 1
    keep(cache, TEXT[:10])
    assert cache.usage().cached == 2


def test_blocks_of_a_closed_sequence_stay_as_cache_and_count_as_free() -> None:
    cache = make()
    keep(cache, TEXT)
    usage = cache.usage()
    assert usage.used == 0 and usage.free == usage.total == 32 and usage.cached == 5


def test_forgetting_empties_the_cache() -> None:
    cache = make()
    keep(cache, TEXT)
    cache.forget()
    assert cache.usage().cached == 0
    cache.check([])
    assert found(cache, TEXT)[0] == 0
