"""The scheduler's rules, one at a time: who runs, with how many rows, at whose cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from simulation import PENDING, STOP, World, group, oracle

from paceline.cache.manager import CacheManager
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.sequence import Sequence, Status
from paceline.engine.schedule.step import GroupResult, Step
from paceline.errors import ConfigError, QueueFullError, RequestError
from paceline.speculation.tree import DraftTree

SIZE = 4


def make(*, blocks: int = 101, budget: int = 64, seats: int = 8, max_len: int = 64, caching: bool = False,
         groups: tuple[object, ...] = (), **options: object) -> World:
    kinds = groups or (group("full"),)
    cache = CacheManager(kinds, [blocks] * len(kinds), SIZE, seats, max_len // SIZE, caching)  # type: ignore[arg-type]
    return World(cache, SchedulerLimits(budget, seats, max_len, **options))  # type: ignore[arg-type]


def talker(world: World, length: int, *, tokens: int = 20, **params: object) -> Sequence:
    """A request whose text does not stop by itself within `tokens` tokens, nor its further samples within two."""
    prompt = [5] * length

    def goes_on(seed: int, tokens: int) -> bool:
        text = list(prompt)
        for _ in range(tokens):
            text.append(oracle(text, seed))
        return STOP not in text[length:]

    samples = range(1, int(params.get("n", 1)))  # type: ignore[call-overload]
    seed = next(seed for seed in range(100_000) if goes_on(seed, tokens) and all(goes_on(seed + i, 2) for i in samples))
    return world.add(prompt, tokens, seed=seed, **params)[0]


def shape(step: Step | None) -> list[tuple[str, int, int]]:
    """(request, start, rows) of each group."""
    assert step is not None
    return [(rows.seq.request.id, rows.start, len(rows.tokens)) for rows in step.groups]


def right_draft(seq: Sequence, length: int) -> DraftTree:
    text = list(seq.tokens)
    for _ in range(length):
        text.append(oracle(text, seq.seed))
    return DraftTree.chain(text[len(seq.tokens):])


def test_the_scheduler_never_imports_torch() -> None:
    code = "import sys, paceline.engine.schedule.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("wrong", [{"max_batch_tokens": 0}, {"max_num_seqs": 0}, {"max_model_len": 0},
                                   {"max_chunk": 0}, {"watermark": 1.0}, {"max_queue": 0}])
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulerLimits(**{"max_batch_tokens": 1, "max_num_seqs": 1, "max_model_len": 1, **wrong})  # type: ignore


# ------------------------------------------------------------------ budget and chunks

def test_a_prompt_is_computed_in_chunks_of_the_budget_and_needs_logits_only_at_its_end() -> None:
    world = make(budget=8)
    talker(world, 19)
    steps = [world.turn() for _ in range(4)]
    assert [shape(step)[0][1:] for step in steps] == [(0, 8), (8, 8), (16, 3), (19, 1)]
    assert [step.groups[0].logits_from for step in steps if step] == [8, 8, 2, 0]


@pytest.mark.parametrize(("chunk", "steps"), [(1, 13), (7, 2), (64, 1)])
def test_max_chunk_limits_the_chunks_of_a_prompt(chunk: int, steps: int) -> None:
    world = make(max_chunk=chunk)
    seq = talker(world, 13)
    for _ in range(steps):
        assert seq.output_len == 0
        world.turn()
    assert seq.output_len == 1


def test_decoding_never_waits_behind_a_long_prompt() -> None:
    world = make(budget=8)
    first = talker(world, 4)
    world.turn()
    second = talker(world, 40)
    for done in range(5):
        step = world.turn()
        assert shape(step) == [(first.request.id, 4 + done, 1), (second.request.id, 7 * done, 7)]


def test_the_rows_of_a_step_never_exceed_the_budget() -> None:
    world = make(budget=3)
    for _ in range(5):
        talker(world, 2)
    world.drain()
    assert world.rows >= 5 * 2


# ------------------------------------------------------------------ order

def test_first_come_first_served_inside_a_priority() -> None:
    world = make(seats=1)
    ids = [talker(world, 3, tokens=2).request.id for _ in range(3)]
    served = []
    while world.scheduler.has_work():
        step = world.turn()
        if step is not None and shape(step)[0][1] == 0:
            served.append(shape(step)[0][0])
    assert served == ids


def test_a_higher_priority_is_served_first() -> None:
    world = make(seats=1)
    low, high, middle = (talker(world, 3, tokens=2, priority=priority) for priority in (-1, 2, 0))
    assert world.scheduler.waiting == [high, middle, low]
    served = []
    while world.scheduler.has_work():
        step = world.turn()
        served += [rows.seq for rows in step.groups if rows.start == 0] if step else []
    assert served == [high, middle, low]


def test_an_urgent_request_takes_the_seat_of_a_less_urgent_one() -> None:
    world = make(seats=2)
    low, high = talker(world, 3), talker(world, 3, priority=1)
    world.turn()
    urgent = talker(world, 3, priority=1)
    step = world.turn()
    assert step is not None and step.preempted == [low]
    assert world.scheduler.running == [high, urgent] and world.scheduler.waiting == [low]
    world.drain()


def test_an_equal_priority_never_takes_a_seat() -> None:
    world = make(seats=1)
    first = talker(world, 3)
    world.turn()
    talker(world, 3)
    world.turn()
    assert world.scheduler.running == [first] and world.scheduler.preemptions == 0


# ------------------------------------------------------------------ blocks, watermark, preemption

def test_an_admission_leaves_the_watermark_free() -> None:
    world = make(blocks=11, watermark=0.3)
    first = talker(world, 16, tokens=5)
    world.turn()
    talker(world, 16, tokens=5)
    world.turn()
    assert world.scheduler.running == [first], "4 + 1 + 4 blocks would leave 1 of 10, less than the watermark of 3"
    while first.status is Status.RUNNING:
        world.turn()
    assert len(world.scheduler.running) <= 1
    world.drain()


def test_the_watermark_does_not_stop_a_sequence_that_is_alone() -> None:
    world = make(blocks=11, watermark=0.9)
    talker(world, 30, tokens=8)
    world.drain()


def test_a_later_request_does_not_overtake_a_blocked_one() -> None:
    world = make(blocks=11, watermark=0.0)
    first = talker(world, 16)
    world.turn()
    long, short = talker(world, 32, tokens=4), talker(world, 2)
    world.turn()
    assert world.scheduler.running == [first] and world.scheduler.waiting == [long, short]
    world.drain()


def test_when_blocks_run_out_the_last_come_is_preempted_and_returns_to_its_old_place() -> None:
    world = make(blocks=9, watermark=0.0)
    first, second = talker(world, 11), talker(world, 11)
    third = talker(world, 3)
    preempted: list[Sequence] = []
    while world.scheduler.preemptions == 0:
        step = world.turn()
        assert step is not None
        preempted += step.preempted
    assert preempted == [third if third.preemptions else second]
    victim = preempted[0]
    assert victim.status is Status.WAITING and victim.computed == 0 and not victim.seated
    assert victim.output_len > 0 and first.status is Status.RUNNING
    world.drain()
    assert first.preemptions == 0


def test_low_priority_is_preempted_before_late_arrival() -> None:
    world = make(blocks=9, watermark=0.0)
    low, high = talker(world, 11), talker(world, 11, priority=1)
    world.drain()
    assert high.preemptions == 0 and low.preemptions > 0


def test_copies_of_a_sequence_preempted_in_the_same_step_are_dropped() -> None:
    world = make(blocks=8, watermark=0.0)
    leader = talker(world, 6, n=3)
    samples = [leader, *leader.siblings]
    world.turn()
    assert world.scheduler.running == samples, "none of the samples stops at its first token"
    talker(world, 20, priority=1, tokens=4)
    step = world.turn()
    assert step is not None and step.preempted == [samples[2], samples[1]]
    assert [copy.target for copy in step.copies] == [leader.allocation.blocks[0][1]]
    world.drain()


def test_drafts_are_trimmed_before_anybody_is_preempted_for_them() -> None:
    world = make(blocks=5, watermark=0.0)
    first, second = talker(world, 6, tokens=3), talker(world, 6, tokens=3)
    world.turn()
    first.draft = second.draft = DraftTree.chain([1] * 2)
    first.limit = second.limit = 64
    first.draft = DraftTree.chain([1] * 12)
    step = world.turn()
    assert [rows[2] for rows in shape(step)] == [2, 2], "row 6 and what is left of its block"
    assert world.scheduler.preemptions == 0


def test_a_draft_gives_its_blocks_back_to_a_decode_in_the_same_step() -> None:
    world = make(blocks=6, watermark=0.0, seats=2)
    first, second = talker(world, 6), talker(world, 7)
    world.turn()
    world.turn()
    assert (first.computed, second.computed) == (7, 8)
    first.draft = DraftTree.chain([1] * 4)
    step = world.turn()
    assert [rows[1:] for rows in shape(step)] == [(7, 1), (8, 1)]
    assert world.scheduler.preemptions == 0 and step is not None and step.groups[0].draft is None


def test_everyone_gets_a_row_before_anyone_gets_a_draft() -> None:
    world = make(budget=4)
    sequences = [talker(world, 1) for _ in range(3)]
    world.turn()
    for seq in sequences:
        seq.draft = right_draft(seq, 4)
    step = world.turn()
    assert [rows[2] for rows in shape(step)] == [2, 1, 1]


def test_a_sequence_that_outgrows_the_cache_ends_with_length() -> None:
    world = make(blocks=4, max_len=64)
    seq = talker(world, 6)
    assert seq.limit == 13
    world.drain()
    assert seq.finish_reason == "length" and len(seq.tokens) == 13


# ------------------------------------------------------------------ drafts

def test_an_accepted_draft_advances_by_its_length_and_one() -> None:
    world = make()
    seq = talker(world, 5)
    world.turn()
    seq.draft = right_draft(seq, 3)
    world.turn()
    assert seq.output_len == 5 and seq.computed == len(seq.tokens) - 1
    world.drain()


def test_a_tree_s_accepted_path_is_compacted_by_the_next_step() -> None:
    world = make(groups=(group("full"), group("window", window=5)))
    seq = talker(world, 6)
    world.turn()
    right = right_draft(seq, 3).tokens
    wrong = [(token + 1) % 6 for token in right]
    seq.draft = DraftTree([wrong[0], right[0], wrong[1], right[1], right[2]], [-1, -1, 1, 1, 3])
    step = world.turn()
    assert step is not None and step.groups[0].parents == [-1, 0, 0, 2, 2, 4] and not step.moves
    assert seq.output_len == 5
    step = world.turn()
    assert step is not None and len(step.moves) == 2 * 3
    world.drain()


def test_a_rejected_draft_leaves_no_block_behind() -> None:
    world = make()
    seq = talker(world, 3)
    world.turn()
    seq.draft = DraftTree.chain([(right_draft(seq, 1).tokens[0] + 1) % 7] + [0] * 11)
    world.turn()
    assert seq.output_len == 2 and len(seq.allocation.blocks[0]) == 1


def test_a_draft_is_trimmed_to_what_the_sequence_may_still_say() -> None:
    world = make()
    seq = talker(world, 5, tokens=4)
    world.turn()
    seq.draft = DraftTree([1, 2, 3, 4, 5, 5], [-1, -1, 0, 1, 2, 4])
    step = world.launch()
    assert shape(step)[0][2] == 1 + 4, "two more tokens may follow the one being verified: depth 2 at most"


def test_moves_of_a_sequence_that_ended_still_serve_the_prefix_cache() -> None:
    world = make(caching=True)
    seq = talker(world, 6)
    world.turn()
    right = right_draft(seq, 3).tokens
    seq.draft = DraftTree([(right[0] + 1) % 6, *right], [-1, -1, 1, 2])
    world.turn()
    text = list(seq.tokens)
    world.scheduler.cancel(seq.request.id)
    heir = world.add(text[:9], 2)[0]
    step = world.turn()
    assert step is not None and step.moves and heir.cached_tokens == 8
    world.drain()


# ------------------------------------------------------------------ schedule ahead

def test_a_plain_decode_can_be_scheduled_before_its_token_is_known() -> None:
    world = make()
    seq = talker(world, 5)
    world.launch()
    ahead = world.launch()
    assert ahead is not None and ahead.groups[0].tokens == [PENDING] and ahead.groups[0].start == 5
    assert world.launch() is None, "one step ahead, no more"
    world.commit()
    world.commit()
    assert seq.output_len == 2


def test_a_drafted_sequence_waits_for_its_commit_while_others_go_ahead() -> None:
    world = make()
    drafted, plain = talker(world, 5), talker(world, 5)
    world.turn()
    drafted.draft = right_draft(drafted, 2)
    world.launch()
    ahead = world.launch()
    assert ahead is not None and [rows.seq for rows in ahead.groups] == [plain]
    world.commit()
    third = world.launch()
    assert third is not None and [rows.seq for rows in third.groups] == [drafted, plain]


def test_a_sequence_that_needs_its_token_on_the_host_is_never_scheduled_ahead() -> None:
    world = make()
    seq = talker(world, 5)
    seq.wait_for_commit = True
    world.launch()
    assert world.launch() is None
    world.commit()
    assert world.launch() is not None


def test_a_sequence_that_is_about_to_end_is_not_scheduled_ahead() -> None:
    world = make()
    talker(world, 5, tokens=1)
    world.launch()
    assert world.launch() is None
    world.commit()
    assert not world.scheduler.has_work()


def test_the_chunks_of_a_prompt_can_be_scheduled_ahead() -> None:
    world = make(budget=4)
    talker(world, 10)
    assert [shape(world.launch())[0][1:], shape(world.launch())[0][1:]] == [(0, 4), (4, 4)]


def test_a_preempted_sequence_keeps_the_token_in_flight_and_waits_for_it() -> None:
    world = make()
    seq = talker(world, 5)
    world.launch()
    world.scheduler.preempt(seq)
    assert world.launch() is None and seq.status is Status.WAITING
    world.commit()
    assert seq.output_len == 1 and seq.status is Status.WAITING
    step = world.launch()
    assert shape(step) == [(seq.request.id, 0, 6)] and step is not None and step.preempted == [seq]


def test_steps_are_committed_once_each_and_in_order() -> None:
    world = make()
    talker(world, 5)
    first, second = world.launch(), world.launch()
    assert first is not None and second is not None
    with pytest.raises(ValueError, match="in the order"):
        world.scheduler.commit(second, [GroupResult([1])])
    with pytest.raises(ValueError, match="1 groups and 0 results"):
        world.scheduler.commit(first, [])
    world.commit()
    with pytest.raises(ValueError, match="in the order"):
        world.scheduler.commit(first, [GroupResult([1])])


# ------------------------------------------------------------------ samples

def test_samples_share_the_prompt_s_blocks_and_copy_on_write() -> None:
    world = make()
    leader = talker(world, 6, n=3)
    samples = [leader, *leader.siblings]
    assert world.scheduler.queue_length == 3
    step = world.turn()
    assert step is not None and list(step.groups[0].siblings) == samples[1:]
    assert world.scheduler.running == samples and all(seq.computed == 6 for seq in samples)
    assert world.cache.usage().used == 2 and world.cache.usage().shared == 2
    step = world.turn()
    assert step is not None and len(step.copies) == 2, "the last holder writes in place"
    world.drain()


def test_a_sample_forked_while_its_leader_runs_ahead_shares_only_the_prompt() -> None:
    world = make()
    leader = talker(world, 8, n=2)
    follower = leader.siblings[0]
    world.launch()
    world.launch()
    world.commit()
    assert len(leader.allocation.blocks[0]) == 3 and len(follower.allocation.blocks[0]) == 2
    world.drain(ahead=True)


def test_samples_without_a_seat_queue_with_their_first_token() -> None:
    world = make(seats=1)
    leader = talker(world, 5, n=3)
    followers = list(leader.siblings)
    world.turn()
    assert world.scheduler.waiting == followers and all(seq.output_len == 1 for seq in followers)
    world.drain()


def test_a_request_for_prompt_logprobs_gets_logits_of_all_rows_and_no_cached_prefix() -> None:
    world = make(caching=True, budget=8)
    talker(world, 12)
    world.drain()
    seq = world.add([5] * 12, 0, prompt_logprobs=1)[0]
    steps = [world.turn(), world.turn()]
    assert [step.groups[0].logits_from for step in steps if step] == [0, 0]
    assert seq.cached_tokens == 0 and seq.cache_miss == "prompt_logprobs"
    assert seq.finish_reason == "length" and seq.output_len == 0


def test_an_admitted_sequence_knows_what_the_prefix_cache_gave_it() -> None:
    world = make(caching=True)
    world.add([5] * 9, 1)
    world.drain()
    hit, miss = world.add([5] * 9, 1)[0], world.add([5] * 6 + [1] * 9, 1)[0]
    step = world.turn()
    assert shape(step)[0][1:] == (8, 1) and (hit.cached_tokens, hit.cache_miss) == (8, None)
    assert (miss.cached_tokens, miss.cache_miss) == (4, "diverged at token 6")


# ------------------------------------------------------------------ requests come and go

def test_a_full_queue_refuses_with_a_sentence() -> None:
    world = make(max_queue=1)
    talker(world, 3)
    with pytest.raises(QueueFullError, match="raise max_queue"):
        talker(world, 3)
    world.turn()
    talker(world, 3)


def test_every_sample_takes_a_place_in_the_queue() -> None:
    world = make(max_queue=4, seats=2)
    talker(world, 3, n=3)
    with pytest.raises(QueueFullError, match="3 samples are waiting, 2 more"):
        talker(world, 3, n=2)
    talker(world, 3)
    assert world.scheduler.queue_length == 4 and world.scheduler.queue_full
    world.turn()
    assert world.scheduler.queue_length == 2, "two hold seats"
    talker(world, 3, n=2)


def test_a_request_of_more_samples_than_places_is_let_into_an_empty_queue() -> None:
    world = make(max_queue=2)
    talker(world, 3, n=5)
    assert world.scheduler.queue_length == 5
    with pytest.raises(QueueFullError):
        talker(world, 3)


@pytest.mark.parametrize(("prompt", "sentence"), [([], "empty"), ([1] * 64, "shorten the prompt"),
                                                  ([1] * 30, "more kv_blocks")])
def test_a_prompt_that_can_never_run_is_refused(prompt: list[int], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make(blocks=7).add(prompt)


def test_a_deadline_ends_waiting_and_running_sequences_with_timeout() -> None:
    world = make(seats=1)
    running, waiting = talker(world, 5, deadline=2.0), talker(world, 5, deadline=1.0)
    patient = talker(world, 5)
    world.turn()
    world.now = 1.0
    assert world.scheduler.expire() == [waiting]
    assert world.scheduler.expire(2.5) == [running]
    assert running.finish_reason == waiting.finish_reason == "timeout" and not running.seated
    assert world.cache.usage().used == 0
    world.drain()
    assert patient.finish_reason == "length" and world.scheduler.expire(99.0) == []


def test_a_cancelled_request_frees_its_blocks_at_once_and_its_results_are_ignored() -> None:
    world = make()
    seq = talker(world, 5, n=2)
    other = seq.siblings[0]
    world.launch()
    assert set(world.scheduler.cancel(seq.request.id)) == {seq, other}
    assert world.cache.usage().used == 0 and not world.scheduler.running
    assert world.scheduler.has_work(), "the step is still to be committed"
    world.commit()
    assert seq.output_len == 0 and not world.scheduler.has_work()
    assert world.scheduler.cancel(seq.request.id) == []


def test_an_id_can_be_used_again_only_when_its_request_is_over() -> None:
    world = make()
    seq = talker(world, 5)
    with pytest.raises(RequestError, match="already in use"):
        world.scheduler.add(seq.request, [0])
    world.scheduler.cancel(seq.request.id)
    world.scheduler.add(seq.request, [0])


def test_after_a_failed_step_nothing_cached_is_trusted() -> None:
    world = make(caching=True)
    first = talker(world, 9)
    world.turn()
    talker(world, 9)
    world.launch()
    ids = {rows.seq.request.id for rows in world.flight[0][0].groups}
    assert first.request.id in ids
    world.fail()
    assert world.cache.usage().cached == 0 and not world.scheduler.running
    talker(world, 9)
    world.drain()
