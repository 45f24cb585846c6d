"""Whole plans: what fits, what pays, cards, cost and advice, and mistakes that are explained."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.serve import serve
from paceline.errors import ConfigError
from paceline.models.native import FAMILIES
from paceline.plan.advice import advise
from paceline.plan.capacity import best_serving, blocks, copies_for, cost_per_million, memory_of
from paceline.plan.drafters import METHODS, NATIVE
from paceline.plan.find import find_drafter
from paceline.plan.hardware import find_hardware, from_dict
from paceline.plan.known import find_shape
from paceline.plan.planner import TREES, Workload, best_draft, cycle_cost, plan
from paceline.plan.report import as_dict, text
from paceline.plan.roofline import Roofline
from paceline.plan.speculation import expected_tokens
from paceline.speculation.spec import BUILDERS, HEADS

SERVER_OPTIONS = {"--" + name.replace("_", "-") for name in inspect.signature(serve).parameters}


def options(found: Any) -> dict[str, str]:
    return {one.option: one.why for one in advise(found)}


def test_what_fits() -> None:
    """An H100 has 80 GB; 13B in float16 take 26, and a text of 4096 tokens 3.36 with 40 heads of keys."""
    found = plan("llama-2-13b", "h100", workload=Workload(batches=(1, 64)), drafters=())
    assert found.memory.sequences == int((0.9 * 80e9 - (1 << 30) - 2 * 13_015_864_320) // (819_200 * 4096)) == 13
    assert [row.fits for row in found.rows] == [True, False]
    assert plan("llama-3.1-70b", "h100", drafters=()).memory.sequences == 0
    assert plan("llama-3.1-70b", "h100x8", drafters=()).memory.sequences > 100


def test_blocks_waste_less_than_one() -> None:
    assert [blocks(tokens) - tokens for tokens in (1, 15, 16, 17)] == [15, 1, 0, 15]


def test_a_latent_is_on_every_card() -> None:
    """Heads can be split between cards, one latent cannot."""
    work = 4096
    latent, grouped = find_shape("deepseek-v2"), find_shape("llama-3.1-70b")
    one, eight = (memory_of(Roofline(latent, find_hardware(name), "bfloat16", "bfloat16"), work).sequence
                  for name in ("h200", "h200x8"))
    assert eight == 8 * one
    one, eight = (memory_of(Roofline(grouped, find_hardware(name), "bfloat16", "bfloat16"), work).sequence
                  for name in ("h200", "h200x8"))
    assert eight == one


def test_a_deeper_batch_gives_more_tokens_and_takes_longer() -> None:
    rows = plan("llama-3.1-8b", "h100", workload=Workload(batches=(1, 8, 64, 256)), drafters=()).rows
    assert [row.tpot_s for row in rows] == sorted(row.tpot_s for row in rows)
    assert [row.tokens_per_s for row in rows] == sorted(row.tokens_per_s for row in rows)
    assert all(row.floor_s < row.tpot_s for row in rows)


def test_the_best_depth_is_the_best() -> None:
    real = Roofline(find_shape("llama-3.1-8b"), find_hardware("h100").sustained(), "bfloat16", "bfloat16")
    drafter = find_drafter("eagle3", real.shape)
    row = best_draft(real, drafter, 8, 1024, 0.8)
    for k in (1, 2, 3, 4, 5, 7, 10, 16):
        assert expected_tokens(0.8, k) / cycle_cost(real, drafter, 8, 1024, k) <= row.speed_up + 1e-12


def test_break_even_is_where_nothing_is_won() -> None:
    found = plan("llama-3.1-8b", "h100", drafters=("eagle3",), workload=Workload(batches=(8,)), k=4)
    level = found.drafts[0].break_even
    assert level is not None
    even = plan("llama-3.1-8b", "h100", drafters=("eagle3",), workload=Workload(batches=(8,)), k=4, acceptance=(level,))
    assert even.drafts[0].speed_up == pytest.approx(1.0)


def test_load_above_which_it_hurts() -> None:
    """On two cores arithmetic takes over at a few rows: drafts pay alone and hurt in a crowd."""
    found = plan("smollm2-135m", "neoverse-n1-2cores", dtype="int8", workload=Workload(context=256, batches=(1, 64)),
                 drafters=("ngram",))
    limit = found.limits[0].batch
    assert limit is not None and 1 <= limit < 16
    inside, beyond = (best_draft(found.roofline, found.drafters[0], batch, 256, found.limits[0].acceptance)
                      for batch in (limit, 4 * limit))
    assert inside.speed_up >= 1.02 > beyond.speed_up
    assert "speculation=None" in options(found) and "adaptive=True" in options(found)
    assert "speculation=None" not in options(plan("llama-3.1-8b", "h200", drafters=("eagle3",)))


def test_a_hopeless_drafter_is_not_advised() -> None:
    found = plan("llama-3.1-8b", "h100", drafters=("draft:llama-2-7b",))
    assert any("vocabulary of 32000" in sentence for sentence in found.problems)
    assert not any(option.startswith("speculation=") for option in options(found))


def test_experts_make_verifying_dear() -> None:
    """A draft of a mixture reads experts that a plain step would not."""
    shape, hardware = find_shape("qwen3-30b-a3b"), find_hardware("h200").sustained()
    dense = find_shape("qwen3-4b")
    costs = [cycle_cost(Roofline(one, hardware, "bfloat16", "bfloat16"), find_drafter("ngram", one), 1, 512, 4)
             for one in (shape, dense)]
    assert costs[0] > 1.5 > 1.2 > costs[1]
    assert "larger batches" in options(plan("qwen3-30b-a3b", "h200", drafters=()))


def test_cards_and_cost() -> None:
    work = Workload(rate=50, prompt=1000, output=200)
    found = plan("llama-3.1-8b", "h100", workload=work, drafters=())
    assert found.serving is not None and found.copies is not None
    assert found.copies == copies_for(50, found.serving)
    assert (found.copies - 1) * 0.8 * found.serving.requests_per_s < 50 <= (
        found.copies * 0.8 * found.serving.requests_per_s)
    assert found.cards == found.copies
    # 3 dollars an hour and 1000 tokens a second: 0.83 dollars for a million.
    assert cost_per_million(3.0, 1, 1000.0) == pytest.approx(0.8333, abs=1e-4)
    dear = plan("llama-3.1-8b", "h100", workload=work, drafters=(), price=6.0)
    assert dear.dollars_per_million == pytest.approx(2 * (found.dollars_per_million or 0))
    assert "50 requests/s need" in text(found)


def test_a_target_for_tokens_bounds_the_batch() -> None:
    roofline = Roofline(find_shape("llama-3.1-8b"), find_hardware("h100").sustained(), "bfloat16", "bfloat16")
    free, bound = (best_serving(roofline, 1000, 200, 128, limit) for limit in (None, 0.02))
    assert free is not None and bound is not None
    assert bound.tpot_s <= 0.02 < free.tpot_s and bound.batch < free.batch
    assert best_serving(roofline, 1000, 200, 128, 1e-4) is None
    found = plan("llama-3.1-8b", "h100", workload=Workload(tpot_s=1e-4, ttft_s=1e-4), drafters=())
    assert len([one for one in found.problems if " ms " in one]) == 2


def test_advice_on_caches_and_weights() -> None:
    crowded = options(plan("llama-2-13b", "h100", workload=Workload(batches=(64,)), drafters=()))
    assert 'kv_dtype="fp8"' in crowded and "max_num_seqs=13" in crowded
    assert 'kv_dtype="fp8"' not in options(plan("llama-2-13b", "a100", workload=Workload(batches=(64,)), drafters=()))
    assert 'kv_dtype="fp8"' not in options(plan("mamba2-2.7b", "rtx-4090", drafters=()))  # a state has no such format
    assert "paceline quantize --to int4" in options(plan("llama-3.1-8b", "epyc-9654", drafters=()))


@pytest.mark.parametrize(("model", "hardware", "count", "others"), [
    ("deepseek-v3", "h100", 10, set()),
    ("llama-3.1-70b", "h100", 3, {"fewer bits"}),
    ("llama-3.1-70b", "h100x2", 3, {"fewer bits", 'kv_dtype="fp8"'}),  # the weights fit, and no text beside them
    ("llama-3.1-70b", "h200", 2, {"fewer bits"}),
    ("llama-3.1-8b", "neoverse-n1-2cores", None, {"paceline quantize --to int8"}),
])
def test_where_nothing_fits_only_room_is_advised(model: str, hardware: str, count: int | None,
                                                 others: set[str]) -> None:
    found = plan(model, hardware)
    assert found.memory.sequences == 0
    assert set(options(found)) == others | ({f"tensor_parallel_size={count}"} if count else set())
    name = found.hardware.name
    assert count is None or [plan(model, f"{name}x{size}").memory.sequences > 0 for size in (count - 1, count)] == [
        False, True]


MEASURED = {1: 6.50, 8: 16.8, 32: 61.2, 128: 235.0}
"""Milliseconds of a step on two Neoverse N1 cores (docs/plan.md)."""


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_two_cores_that_were_measured_are_planned_as_they_are(kv_dtype: str | None) -> None:
    """The entry is made of what the machine reads and its products reach; no step was fitted."""
    found = plan("smollm2-135m", "neoverse-n1-2cores", dtype="int8", kv_dtype=kv_dtype, drafters=(),
                 workload=Workload(context=128, batches=tuple(MEASURED)))
    for row in found.rows:
        assert 1e3 * row.tpot_s == pytest.approx(MEASURED[row.batch], rel=0.15)


def test_a_first_token_waits_for_those_who_decode() -> None:
    """Alone it is the prompt's own step; beside others half of theirs comes before it, and its own holds them too."""
    found = plan("llama-3.1-8b", "h100", drafters=(), workload=Workload(context=4096, batches=(1, 8, 64)))
    alone, few, many = found.rows
    assert alone.ttft_s == pytest.approx(found.ttft_s)
    real = Roofline(found.shape, found.hardware.sustained(), found.dtype, found.kv_dtype)
    for row in (few, many):
        beside = real.mixed([(1, 3072, 0), (row.batch - 1, 1, 4096)]).total
        assert row.ttft_s == pytest.approx(beside + real.decode(row.batch - 1, 4096) / 2)
    assert alone.ttft_s < few.ttft_s < many.ttft_s < alone.ttft_s + 1.5 * many.tpot_s


def test_four_bits_on_a_cpu_are_computed_in_int8() -> None:
    """195 tok/s alone and 439 with eight at once, from 64 tokens to 192, were measured of a file's 4-bit blocks: one is
    quicker than in int8, eight are slower."""
    rows = {dtype: plan("smollm2-135m", "neoverse-n1-2cores", dtype=dtype, kv_dtype="int8", drafters=(),
                        workload=Workload(context=128, batches=(1, 8))).rows for dtype in ("int4", "int8")}
    assert rows["int4"][0].tpot_s < rows["int8"][0].tpot_s and rows["int4"][1].tpot_s > rows["int8"][1].tpot_s
    for row, measured in zip(rows["int4"], (195, 439)):
        assert row.batch / row.tpot_s == pytest.approx(measured, rel=0.15)
    wide = find_hardware("h100")
    assert wide.arithmetic("int4") == wide.arithmetic("bfloat16")
    assert "another device" in options(plan("llama-3.1-8b", "mi300x", drafters=()))
    assert "tensor_parallel_size=2" in options(plan("llama-3.1-8b", "h100x2", drafters=()))


def test_targets_and_copies_are_advised_as_the_server_s_options() -> None:
    found = plan("llama-3.1-8b", "h100", drafters=(), workload=Workload(
        prompt=1000, output=200, rate=50, ttft_s=0.5, tpot_s=0.05))
    told = options(found)
    assert found.copies is not None and found.copies > 1 and found.serving is not None
    copies = told[f"paceline serve --replicas {found.copies}"]
    assert f"50 requests a second take {found.copies} copies" in copies and "each on h100" in copies
    assert "nobody's drafts get rows" in told["paceline serve --target-ttft-ms 500"]
    assert "paceline serve --target-tpot-ms 50" in told
    for option in told:
        if option.startswith("paceline serve"):
            assert option.split()[2] in SERVER_OPTIONS
    pairs = plan("llama-3.1-70b", "h100x4", drafters=(), workload=Workload(prompt=1000, output=200, rate=50))
    assert "each on h100x4" in options(pairs)[f"paceline serve --replicas {pairs.copies}"]


@pytest.mark.parametrize("work", [Workload(), Workload(rate=0.01), Workload(tpot_s=1e-4, ttft_s=1e-4)])
def test_what_was_not_asked_or_cannot_be_met_is_not_advised(work: Workload) -> None:
    told = options(plan("llama-3.1-8b", "h100", workload=work, drafters=()))
    assert not any(option.startswith("paceline serve") for option in told)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_list_is_paceline_s_and_has_a_plan(method: str) -> None:
    assert method in BUILDERS
    found = plan("llama-3.1-8b", "h100", drafters=(method,))
    assert found.drafts[0].speed_up > 0 and 0.2 < found.drafters[0].acceptance < 1.0


def test_trained_heads_are_all_in_the_list() -> None:
    assert set(HEADS) <= set(METHODS)


def test_what_must_agree_between_caches() -> None:
    found = {one.drafter: one for one in plan("llama-3.1-8b", "h100", drafters=(
        "ngram", "eagle3", "skip", "draft:llama-3.2-1b")).beside}
    assert found["ngram"].weights == found["skip"].weights == 0
    assert "the target's" in found["skip"].cache and "planes" in found["eagle3"].cache
    assert found["draft:llama-3.2-1b"].sequence == find_shape("llama-3.2-1b").cache_bytes(4096)
    assert found["draft:llama-3.2-1b"].sequences < found["ngram"].sequences


@pytest.mark.parametrize(("target", "hardware", "draft", "kv_dtype", "why"), [
    ("deepseek-v2", "h200x8", "deepseek-v2-lite", "fp8", "latent of MLA"),
    ("deepseek-v2", "h200x8", "deepseek-v2-lite", "bfloat16", None),
    ("llama-2-7b", "epyc-9654", "mixtral-8x7b", "int8", "does not run mixtral models whole"),
    ("llama-2-7b", "epyc-9654", "mixtral-8x7b", "float16", None),
    ("llama-2-13b", "epyc-9654", "llama-2-7b", "int8", None)])
def test_a_draft_model_s_cache_that_cannot_have_the_format_asked_for(target: str, hardware: str, draft: str,
                                                                     kv_dtype: str, why: str | None) -> None:
    found = plan(target, hardware, kv_dtype=kv_dtype, drafters=(f"draft:{draft}", "eagle3"))
    said = [sentence for sentence in found.problems if "The cache of" in sentence]
    assert len(said) == (why is not None)
    assert all(f"The cache of draft:{draft} cannot be in {kv_dtype}: " in one and str(why) in one for one in said)


def test_native_families_are_those_of_the_decoder() -> None:
    assert NATIVE == FAMILIES


def test_every_depth_acceptance_and_batch_has_a_row() -> None:
    """A reader of the JSON can choose a depth for an acceptance that is not the one that was typed first."""
    work = Workload(context=1024, batches=(1, 32))
    found = plan("llama-3.1-8b", "h100", workload=work, drafters=("ngram", "dspark"), acceptance=(0.5, 0.9), k=6)
    rows = json.loads(json.dumps(as_dict(found)))["by_k"]
    depths = {"ngram": [1, 2, 3, 4, 5, 6, 7, 10, 16], "dspark": [1, 2, 3, 4, 5, 6, 7]}  # a block has 7
    assert [(row["drafter"], row["batch"], row["acceptance"], row["k"]) for row in rows] == [
        (drafter, batch, a, k) for drafter, known in depths.items() for batch in (1, 32) for a in (0.5, 0.9)
        for k in known]
    for row in rows:
        drafter = found.drafters[list(depths).index(row["drafter"])]
        cost = cycle_cost(found.roofline, drafter, row["batch"], 1024, row["k"])
        assert row["tokens"] == pytest.approx(expected_tokens(row["acceptance"], row["k"]))
        assert row["speed_up"] == pytest.approx(row["tokens"] / cost)
    asked = {(row.drafter, row.batch, row.acceptance): row.speed_up for row in found.drafts}
    assert asked == {(row["drafter"], row["batch"], row["acceptance"]): row["speed_up"] for row in rows
                     if row["k"] == 6}


def test_trees_are_planned_for_every_acceptance() -> None:
    found = plan("llama-3.1-8b", "h100", drafters=("ngram", "eagle3"), acceptance=(0.5, 0.9))
    assert [(row.drafter, row.acceptance, row.branches) for row in found.trees] == [
        ("eagle3", a, branches) for a in (0.5, 0.9) for branches in TREES]
    low, high = found.trees[:len(TREES)], found.trees[len(TREES):]
    assert all(a.tokens < b.tokens and a.speed_up < b.speed_up for a, b in zip(low, high))
    printed = {line.split()[2] for line in text(found).splitlines() if line.startswith("eagle3") and "2x2x1x1" in line}
    assert printed == {"0.50", "0.90"}


def test_a_report_has_every_part() -> None:
    found = plan("qwen3-30b-a3b", "h100", workload=Workload(rate=1.0), drafters=("ngram", "eagle3"))
    written = text(found)
    for part in ("30.532 billion", "FLOP/byte", "TTFT ms", "TPOT ms", "experts", "break-even", "Drafters in memory",
                 "Trees", "for a million output tokens", "What to switch on"):
        assert part in written, part
    raw = json.loads(json.dumps(as_dict(found)))
    assert raw["model"]["parameters"] == 30_532_122_624
    assert [row["batch"] for row in raw["decode"]] == [1, 8, 64]
    assert raw["hardware"]["ridge"] == pytest.approx(295.2, abs=0.1)
    assert raw["advice"] and raw["speculation"] and raw["limits"] and raw["cards"] >= 1


def test_own_hardware(tmp_path: Path) -> None:
    file = tmp_path / "box.json"
    file.write_text(json.dumps({"memory_gb": 96, "bandwidth_gb_s": 1000, "tflops": {"bfloat16": 100}, "price": 1}))
    box = find_hardware(str(file))
    assert (box.name, box.bandwidth, box.ridge("bfloat16")) == ("box", 1e12, 100.0)
    assert box.arithmetic("int4") == box.arithmetic("fp8") == 1e14
    assert find_hardware("H100x8").count == 8 and find_hardware("mi300x").count == 1


@pytest.mark.parametrize(("raw", "said"), [
    ({}, "tflops must map"), ({"tflops": {"bfloat16": 1}}, "memory_gb must be"),
    ({"tflops": {"bfloat16": 0}, "memory_gb": 1, "bandwidth_gb_s": 1}, "tflops of bfloat16"),
    ({"tflops": {"bfloat16": 1}, "memory_gb": 1, "bandwidth_gb_s": 1, "cores": 2}, "unknown key 'cores'"),
    ({"tflops": {"bfloat16": 1}, "memory_gb": 1, "bandwidth_gb_s": 1, "kind": "abacus"}, "kind must be"),
    ({"tflops": {"bfloat16": 1}, "memory_gb": 1, "bandwidth_gb_s": 1, "count": 0}, "share a model, not 0")])
def test_hardware_that_makes_no_sense(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_dict(raw)


@pytest.mark.parametrize(("change", "said"), [
    ({"hardware": "h1000"}, "did you mean h100"), ({"hardware": "h100x0"}, "share a model, not 0"),
    ({"hardware": "no.json"}, "not readable as JSON"), ({"model": "lama-3-8b"}, "did you mean llama-3-8b"),
    ({"drafters": ("eagle33",)}, "did you mean 'eagle3'"), ({"drafters": ("draft:nothing",)}, "There is no drafter"),
    ({"dtype": "int3"}, "dtype must be one of"), ({"kv_dtype": "q8"}, "kv_dtype must be one of"),
    ({"acceptance": (1.5,)}, "from 0 to 1"), ({"k": 0}, "k must be"), ({"price": -1.0}, "price is dollars")])
def test_mistakes_are_explained(change: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": "llama-3-8b", "hardware": "h100"} | change
    with pytest.raises(ConfigError, match=said):
        plan(arguments.pop("model"), **arguments)


@pytest.mark.parametrize(("change", "said"), [
    ({"context": 0}, "context must be"), ({"batches": ()}, "batch names no"), ({"batches": (0,)}, "batch must be"),
    ({"rate": 0.0}, "rate must be"), ({"tpot_s": float("nan")}, "tpot must be"), ({"prompt": 1 << 40}, "prompt must")])
def test_workloads_that_make_no_sense(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Workload(**change)


def test_hardware_without_a_format_says_so() -> None:
    mine = replace(find_hardware("h100"), flops={"int8": 1.0})
    with pytest.raises(ConfigError, match="has no figure for bfloat16"):
        mine.arithmetic("bfloat16")


def test_planning_needs_no_torch() -> None:
    code = ("import sys; from paceline.plan.planner import plan; from paceline.plan.report import text; "
            "text(plan('llama-2-13b', 'h100', drafters=('eagle3', 'dspark', 'medusa', 'llama-2-7b'))); "
            "assert 'torch' not in sys.modules, 'torch'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
