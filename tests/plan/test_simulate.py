"""Fleets on paper: every request ends, time adds up, and taking many steps at once changes nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.config import EngineConfig, EngineOptions, Facts, resolve
from paceline.errors import ConfigError
from paceline.plan.planner import Plan, plan
from paceline.plan.simulate.costs import MeasuredCosts, Part, PlannedCosts, speculation
from paceline.plan.simulate.figures import Targets, advice, best, figures
from paceline.plan.simulate.fleet import Done, Engine, Layout, simulate
from paceline.plan.simulate.host import FrontCost, Host, Work
from paceline.plan.simulate.traffic import Asked, made_up
from paceline.speculation.step_cost import Load, StepCost

ROUTINGS = ("prefix", "round-robin", "random")


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan("llama-3.1-8b", "h100", drafters=("eagle3",))


def config(blocks: int = 4000, seqs: int = 16, rows: int = 512, longest: int = 4096) -> EngineConfig:
    return resolve(EngineOptions(kv_blocks=blocks, max_num_seqs=seqs, max_batch_tokens=rows), Facts(
        device="cuda", context=longest, bytes_per_token=1 << 17, free_memory=1 << 40, cores=1))


def engine(planned: Plan, drafts: bool = False, **sizes: int) -> Engine:
    return Engine(config(**sizes), PlannedCosts(planned.roofline), speculation(planned, 512, None) if drafts else None,
                  token_bytes=1 << 17)


def ends(done: Done) -> list[tuple[float | None, float | None, int, int]]:
    return [(job.first, job.end, job.cached, job.preemptions) for job in done.jobs]


def mixed_traffic(seed: int, requests: int = 60) -> list[Asked]:
    luck, at, found = random.Random(seed), 0.0, []
    for place in range(requests):
        at += luck.expovariate(8.0)
        prefix = luck.choice((None, "a", "b"))
        found.append(Asked(at, luck.randint(200, 900), luck.randint(1, 120), prefix, 160 if prefix else 0,
                           session=luck.choice((None, None, "one", "two")), priority=luck.choice((0, 0, 0, 1)),
                           tenant=luck.choice(("", "", "other")), line=place))
    return found


def test_one_request_takes_what_is_planned(planned: Plan) -> None:
    done = simulate([Asked(3.0, 1000, 100)], engine(planned, rows=2048), Layout(replicas=1))
    job, roofline = done.jobs[0], planned.roofline
    assert job.first is not None and job.end is not None
    assert job.first - 3.0 == pytest.approx(roofline.prefill(1000), abs=1e-9)
    assert job.end - job.first == pytest.approx(sum(roofline.decode(1, 1000 + n) for n in range(99)), abs=1e-9)
    assert done.steps == 100 and job.preemptions == 0


@pytest.mark.parametrize("layout", [Layout(replicas=3, routing=routing) for routing in ROUTINGS]
                         + [Layout(prefill=1, decode=2)], ids=lambda layout: layout.name)
def test_every_request_ends_once_with_all_its_tokens(planned: Plan, layout: Layout) -> None:
    trace = mixed_traffic(1)
    done = simulate(trace, engine(planned, drafts=True), layout)
    assert [job.asked for job in done.jobs] == trace
    for job in done.jobs:
        assert job.first is not None and job.end is not None and job.asked.at < job.first <= job.end <= done.elapsed
        assert job.said == job.asked.output_tokens and 0 <= job.cached < job.asked.prompt_tokens
    assert 0.0 < done.busy <= 1.0
    assert ends(simulate(trace, engine(planned, drafts=True), layout)) == ends(done)


@pytest.mark.parametrize("drafts", (False, True), ids=("plain", "drafts"))
@pytest.mark.parametrize("seed", (0, 1, 2, 6))
def test_many_steps_at_once_are_the_same_as_one_by_one(planned: Plan, seed: int, drafts: bool) -> None:
    """With room for all. Contexts grow evenly inside a run of steps, so times differ by rounding, and with drafts by
    where inside a run a token more is counted. These seeds have no choice of a replica that hangs by less than that:
    with others (one of sixteen) a request goes elsewhere."""
    trace = mixed_traffic(seed)
    layout = Layout(replicas=2, routing=ROUTINGS[seed % 3])
    fast, slow = (simulate(trace, engine(planned, drafts), layout, jumps=jumps) for jumps in (True, False))
    for one, other in zip(ends(fast), ends(slow)):
        assert one[0] == pytest.approx(other[0], abs=2e-5 if drafts else 1e-6)
        assert one[1] == pytest.approx(other[1], abs=2e-5 if drafts else 1e-6)
        assert one[2:] == other[2:]
    assert fast.steps == slow.steps


def test_and_where_blocks_run_out(planned: Plan) -> None:
    trace = mixed_traffic(5)
    small = engine(planned, blocks=150, seqs=8)
    fast, slow = (simulate(trace, small, Layout(replicas=1), jumps=jumps) for jumps in (True, False))
    assert sum(job.preemptions for job in slow.jobs) > 0
    assert [(job.cached, job.preemptions) for job in fast.jobs] == [(job.cached, job.preemptions) for job in slow.jobs]
    assert [job.end for job in fast.jobs] == pytest.approx([job.end for job in slow.jobs], abs=1e-6)


def test_routing_by_prefix_finds_more_in_caches_than_chance(planned: Plan) -> None:
    trace = made_up("rate=30,seconds=8,prompt=400,prefix=320,prefixes=24,output=8", 1, 1)
    hits = {routing: figures(simulate(trace, engine(planned), Layout(replicas=8, routing=routing)), Targets(),
                             None).hit_rate for routing in ROUTINGS}
    assert hits["prefix"] > 1.2 * hits["random"] and hits["prefix"] > 1.2 * hits["round-robin"]


def test_a_conversation_finds_its_own_answer(planned: Plan) -> None:
    trace = [Asked(0.0, 320, 64, session="s"), Asked(60.0, 500, 8, session="s"), Asked(61.0, 500, 8, session="t")]
    jobs = simulate(trace, engine(planned), Layout(replicas=4)).jobs
    assert [job.cached for job in jobs] == [0, 368, 0]  # whole blocks of all but the answer's last token, and of nobody


def test_what_comes_before_warms_caches_and_does_not_count(planned: Plan) -> None:
    trace = [Asked(-5.0, 320, 8, "p", 160), Asked(0.0, 320, 8, "p", 160)]
    for host in (None, Host(1)):
        done = simulate(trace, replace(engine(planned), host=host), Layout(replicas=1))
        (job,) = done.jobs
        assert job.cached == 160 and done.elapsed == job.end and done.busy == pytest.approx(1.0)


def test_other_tenants_find_nothing(planned: Plan) -> None:
    trace = [Asked(float(at), 320, 4, "p", 160, tenant=tenant) for at, tenant in enumerate(("", "x", "x"))]
    assert [job.cached for job in simulate(trace, engine(planned), Layout(replicas=1)).jobs] == [0, 0, 160]


def test_a_thousand_replicas_cost_no_more_than_their_requests(planned: Plan) -> None:
    trace = made_up("rate=100,seconds=4,prompt=256,output=100,prefixes=20,prefix=128", 1, 1)
    done = simulate(trace, engine(planned, blocks=500), Layout(replicas=1000))
    assert all(job.said == 100 for job in done.jobs) and sum(job.cached for job in done.jobs) > 0
    assert done.steps >= 50 * len(trace)  # nobody decodes far from alone: these were not taken one by one


def test_kv_travels_from_prefill_to_decode(planned: Plan) -> None:
    """Whole blocks do; who decodes computes the rest, and its first token is the one that is told."""
    one, roofline = engine(planned, rows=2048), planned.roofline
    (job,) = simulate([Asked(0.0, 1024, 10)], one, Layout(prefill=1, decode=1)).jobs
    assert job.first is not None and job.end is not None
    moved = 1008 * one.token_bytes / one.link
    assert job.first == pytest.approx(roofline.prefill(1024) + moved + roofline.step(1, 16, 1008).total)
    assert job.end - job.first == pytest.approx(sum(roofline.decode(1, 1024 + n) for n in range(9)), rel=1e-6)
    assert job.cached == 0  # what travels was computed, if elsewhere


def test_what_who_decodes_has_does_not_travel(planned: Plan) -> None:
    trace = [Asked(0.0, 1024, 10, "p", 512), Asked(60.0, 1024, 10, "p", 512), Asked(120.0, 520, 10, "p", 512)]
    one = replace(engine(planned, rows=2048), link=engine(planned).link / 1000)
    first, second, third = simulate(trace, one, Layout(prefill=1, decode=1)).jobs
    assert first.first is not None and second.first is not None and third.first is not None
    assert first.first > 1008 * one.token_bytes / one.link
    assert 496 * one.token_bytes / one.link < second.first - 60.0 < 520 * one.token_bytes / one.link
    assert third.first - 120.0 == pytest.approx(planned.roofline.step(1, 8, 512).total)  # nobody prefills for a block
    assert [job.cached for job in (first, second, third)] == [0, 512, 512]


def test_who_decodes_is_chosen_for_its_load_more_than_for_what_it_has(planned: Plan) -> None:
    """As the real router does: to bring a beginning is cheaper than to decode beside somebody. To compute it is not."""
    trace = [Asked(0.0, 1024, 1000, "p", 512), Asked(1.0, 1024, 10, "p", 512)]
    apart, together = Layout(prefill=1, decode=2, routing="prefix"), Layout(replicas=2, routing="prefix")
    busy, brought = simulate(trace, engine(planned, rows=2048), apart).jobs
    assert brought.decodes_at not in (None, busy.decodes_at)
    assert [job.cached for job in simulate(trace, engine(planned, rows=2048), together).jobs] == [0, 512]


def test_texts_that_travel_at_once_share_the_link(planned: Plan) -> None:
    one = replace(engine(planned, rows=2048), link=engine(planned).link / 1000)
    jobs = simulate([Asked(0.0, 1024, 2), Asked(0.0, 1024, 2)], one, Layout(prefill=2, decode=1, routing="round-robin"))
    early, late = sorted(job.first or 0.0 for job in jobs.jobs)
    assert late - early == pytest.approx(1008 * one.token_bytes / one.link, rel=1e-3)


def test_replicas_that_share_cores_take_turns(planned: Plan) -> None:
    trace = [Asked(0.0, 300, 50, line=place) for place in range(4)]
    alone, shared = (simulate(trace, replace(engine(planned), host=host), Layout(replicas=4, routing="round-robin"))
                     for host in (None, Host(2)))
    assert shared.elapsed == pytest.approx(2 * alone.elapsed)


def test_who_is_alone_on_its_cores_is_not_slowed_down(planned: Plan) -> None:
    """Two of three share one core while both are there; the third comes when they are gone."""
    trace = [Asked(0.0, 300, 50), Asked(0.0, 300, 50), Asked(60.0, 300, 50)]
    alone = simulate(trace[:1], engine(planned), Layout(replicas=1)).elapsed
    shared = simulate(trace, replace(engine(planned), host=Host(1)), Layout(replicas=3, routing="round-robin"))
    assert [job.end - job.asked.at for job in shared.jobs] == pytest.approx([2 * alone, 2 * alone, alone])  # type: ignore[operator]


def test_threads_are_of_every_replica(planned: Plan) -> None:
    trace = [Asked(0.0, 300, 50), Asked(0.0, 300, 50)]
    once, twice = (simulate(trace, replace(engine(planned), host=Host(4, threads=threads)),
                            Layout(replicas=2, routing="round-robin")).elapsed for threads in (2, 4))
    assert twice == pytest.approx(2 * once)


def test_speeds_of_what_shares_a_machine() -> None:
    read, light, none = Work(2.0, read=20.0), Work(1.0, read=1.0), Work(1.0)
    assert Host(2).speeds([none]) == [1.0] and Host(2).speeds([none] * 4) == [0.5] * 4
    assert Host(2, threads=2).speeds([none, Work(1.0, threads=1)]) == pytest.approx([2 / 3, 2 / 3])
    assert Host(1).speeds([Work(1.0, tokens=100.0)], token_s=0.01) == [0.5]
    assert Host(4, bandwidth=100.0).speeds([read, light]) == [1.0, 1.0]
    assert Host(4, bandwidth=6.0).speeds([read, light, none]) == pytest.approx([0.5, 1.0, 1.0])
    assert Host(4, bandwidth=10.0).speeds([read, read]) == pytest.approx([0.5, 0.5])
    assert Host(1, bandwidth=10.0).speeds([read, read]) == pytest.approx([0.5, 0.5])  # the core holds them up as much


def test_memory_is_shared_as_cores_are(planned: Plan) -> None:
    """Steps that read all the time take twice as long where two read; one that computes takes as long as ever."""
    roofline = planned.roofline
    host = Host(8, bandwidth=roofline.hardware.bandwidth)
    layout = Layout(replicas=2, routing="round-robin")
    decoding = [Asked(0.0, 1, 200), Asked(0.0, 1, 200)]
    alone, shared = (simulate(decoding, replace(engine(planned), host=one), layout).elapsed for one in (None, host))
    busy = roofline.read_bytes([(1, 1, 100)]) / roofline.hardware.bandwidth / roofline.decode(1, 100)
    assert 1.2 < shared / alone == pytest.approx(2 * busy, rel=1e-2)
    prompts = [Asked(0.0, 4000, 1), Asked(0.0, 4000, 1)]
    wide = engine(planned, rows=4096)
    alone, shared = (simulate(prompts, replace(wide, host=one), layout).elapsed for one in (None, host))
    assert shared == pytest.approx(alone)


def test_the_front_reads_one_request_after_the_other_and_takes_its_share(planned: Plan) -> None:
    front = FrontCost(request=0.5, token=0.0)
    trace = [Asked(0.0, 300, 1), Asked(0.0, 300, 1)]
    one = replace(engine(planned), host=Host(4), front=front)
    firsts = [job.first for job in simulate(trace, one, Layout(replicas=2, routing="round-robin")).jobs]
    prefill = planned.roofline.prefill(300)
    assert firsts == pytest.approx([0.5 + prefill, 1.0 + prefill])
    long = [Asked(0.0, 300, 200)]
    plain, streamed = (simulate(long, replace(one, host=Host(1), front=FrontCost(0.0, token)), Layout(replicas=1))
                       for token in (0.0, 0.01))
    assert streamed.elapsed - plain.elapsed == pytest.approx(200 * 0.01, rel=1e-6) and plain.front == 0.0
    assert streamed.front == pytest.approx(200 * 0.01 / streamed.elapsed)
    apart = simulate(long, replace(one, host=None), Layout(replicas=1))  # elsewhere it is counted alone
    assert apart.elapsed == pytest.approx(plain.elapsed) and apart.front == pytest.approx(0.5 / apart.elapsed)


def test_a_full_queue_refuses_and_others_are_asked_first(planned: Plan) -> None:
    one = engine(planned, seqs=1)
    one = replace(one, config=replace(one.config, max_queue=2))
    trace = [Asked(0.0, 300, 20, line=place) for place in range(9)]
    done = simulate(trace, one, Layout(replicas=2, routing="prefix"))
    refused = [job for job in done.jobs if job.refused]
    assert len(refused) == 5 and all(job.first is None for job in refused)  # two queues of two: nobody has a seat yet
    found = figures(done, Targets(ttft=60.0), None)
    assert (found.requests, found.refused) == (4, 5) and found.slo_share == pytest.approx(4 / 9)


def test_more_than_can_be_served_queues_and_ends(planned: Plan) -> None:
    one = engine(planned, seqs=4)
    one = replace(one, config=replace(one.config, max_queue=50))
    trace = made_up("rate=200,seconds=3,prompt=800,output=40", 1, 1)
    found = figures(simulate(trace, one, Layout(replicas=1)), Targets(ttft=0.5), None)
    assert found.refused > 0 and found.requests + found.refused == len(trace) and found.utilisation > 0.99
    assert found.ttft[99] > found.ttft[50] > 0.5 and found.slo_share is not None and found.slo_share < 0.2


def test_steps_are_as_short_as_the_engine_makes_them(planned: Plan) -> None:
    """While somebody decodes, a long prompt comes in pieces that take no longer than a step may."""
    seen: list[float] = []

    class Watched(PlannedCosts):
        def seconds(self, batch: int, rows: int, context: float, prompts: Sequence[Part] = ()) -> float:
            found = super().seconds(batch, rows, context, prompts)
            seen.extend([found] if batch and prompts else [])
            return found

    trace = [Asked(0.0, 16, 400), Asked(0.5, 4000, 2)]
    whole = replace(engine(planned, rows=4096), costs=Watched(planned.roofline))
    simulate(trace, whole, Layout(replicas=1))
    assert len(seen) == 1 and seen.pop() > 0.08
    simulate(trace, replace(whole, config=replace(whole.config, max_step_ms=20.0)), Layout(replicas=1))
    assert len(seen) >= 4 and max(seen) < 0.025


@pytest.mark.parametrize("limits", [{"max_batch_tokens": 24}, {"max_step_ms": 7.0}], ids=("rows", "time"))
def test_drafts_that_have_no_room_are_left_out(planned: Plan, limits: dict[str, int]) -> None:
    one = engine(planned, drafts=True, rows=512)
    one = replace(one, config=replace(one.config, **limits))
    trace = [Asked(0.0, 20, 60 + place) for place in range(12)]
    fast, slow = (simulate(trace, one, Layout(replicas=1), jumps=jumps) for jumps in (True, False))
    assert [job.end for job in fast.jobs] == pytest.approx([job.end for job in slow.jobs], abs=1e-4)


def test_measured_costs_are_those_of_the_engine() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(Load(1, 100.0), 0.010)
        cost.observe(Load(0, 0.0, 100, 5000.0), 0.5)
    done = simulate([Asked(0.0, 100, 11)], Engine(config(), MeasuredCosts(cost)), Layout(replicas=1))
    job = done.jobs[0]
    assert job.first == pytest.approx(0.5, rel=0.1)
    assert job.end - job.first == pytest.approx(0.1, rel=0.1)  # type: ignore[operator]


def test_the_cheapest_that_keeps_to_the_targets_is_best(planned: Plan) -> None:
    trace = made_up("rate=20,seconds=10,prompt=1000,output=60", 1, 1)
    found = [figures(simulate(trace, engine(planned), Layout(replicas=count, routing="round-robin")), targets, 3.0)
             for targets in [Targets(ttft=0.3)] for count in (1, 4, 8)]
    assert found[0].slo_share is not None and found[0].slo_share < 0.99
    assert best(found).replicas == 4 and "fewest replicas" in advice(found, Targets(ttft=0.3))
    assert found[1].dollars == pytest.approx(3.0 * 4 * found[1].elapsed_s / 3600)


def test_what_fits_nowhere_is_refused_with_its_line(planned: Plan) -> None:
    with pytest.raises(ConfigError, match=r"Line 7 .* 5000 . 10 tokens, and the context holds 4096"):
        simulate([Asked(0.0, 5000, 10, line=7)], engine(planned), Layout(replicas=1))
    with pytest.raises(ConfigError, match=r"Line 7 .* cache holds 160"):
        simulate([Asked(0.0, 500, 10, line=7)], engine(planned, blocks=10), Layout(replicas=1))


@pytest.mark.parametrize("wrong", [{}, {"replicas": 1, "prefill": 1, "decode": 1}, {"prefill": 1}, {"replicas": -1}])
def test_impossible_fleets_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Layout(**wrong)  # type: ignore[arg-type]
