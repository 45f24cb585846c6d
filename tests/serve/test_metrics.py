"""What Prometheus reads, and the logs."""

from __future__ import annotations

import json
import logging
import re
import sys

import httpx
from prometheus_client.parser import text_string_to_metric_families
from serving import WAIT, parse_metrics, served

from engine.tiny import tiny_engine
from paceline import SamplingParams
from paceline.engine.drafting.models import LoadedModel
from paceline.serve.logs import JsonLines, TextLines
from paceline.serve.metrics import ServerMetrics, engine_state

VLLM = [
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
    "vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_success_total",
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
]
"""The series that dashboards for vLLM ask for."""


def test_the_numbers_add_up() -> None:
    prompt = [5, 6, 7, 8] * 8
    with served(tiny_engine()) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        for body in ({"speculation": "none"}, {"speculation": {"method": "ngram", "k": 3, "adaptive": False}, "n": 2},
                     {"max_tokens": 3, "stream": True}):
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0} | body)
            assert answer.status_code == 200
        http.post("/v1/completions", json={"prompt": []})
        text = http.get("/metrics").text
    found = parse_metrics(text)
    names = {re.sub(r"\{.*", "", name) for name in found}
    assert [name for name in VLLM if name not in names] == []
    assert found["vllm:generation_tokens_total"] == 24 + 48 + 3
    assert found["vllm:prompt_tokens_total"] == 3 * len(prompt)
    assert found["vllm:prompt_tokens_cached_total"] == found["vllm:prefix_cache_hits_total"] == 2 * 24
    assert found["paceline_prompt_rows_total"] == 3 * len(prompt) - 2 * 24
    assert found['vllm:request_success_total{finished_reason="length"}'] == 4
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:request_generation_tokens_sum"] == 75
    assert found["vllm:inter_token_latency_seconds_count"] == 23 + 23 + 2
    assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0
    drafted = found['paceline_speculation_drafted_tokens_total{method="ngram"}']
    assert drafted == found["vllm:spec_decode_num_draft_tokens_total"] > 0
    accepted = [value for name, value in found.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per")
                and "_created" not in name]
    assert sum(accepted) == found["vllm:spec_decode_num_accepted_tokens_total"]
    plain, spent, won = (found[f'paceline_speculation_{name}{{method="ngram"}}'] for name in (
        "plain_seconds_total", "spent_seconds_total", "won_seconds"))
    assert plain > 0 and spent > 0 and abs(won - (plain - spent)) < 1e-6
    blocks = [found[f'paceline_cache_blocks{{state="{state}"}}'] for state in ("used", "cached", "free")]
    assert sum(blocks) == 400 and blocks[0] == 0 and blocks[1] > 0
    assert found['paceline_http_responses_total{status="200"}'] == 3
    assert found['paceline_http_responses_total{status="400"}'] == 1
    assert found["paceline_event_loop_lag_seconds_count"] > 0
    stages = [found[f'paceline_step_seconds_total{{stage="{stage}"}}'] for stage in ("schedule", "forward", "sample")]
    assert all(seconds > 0 for seconds in stages)
    if sys.platform == "linux":
        parts = {part: found[f'paceline_memory_bytes{{part="{part}"}}'] for part in ("cache", "files", "heap", "other")}
        assert 0 < parts["cache"] < sum(parts.values()) and found["paceline_python_blocks"] > 10_000
    assert list(text_string_to_metric_families(text)), "Prometheus' own parser reads it"


def test_two_apps_do_not_share_their_numbers() -> None:
    first, second = ServerMetrics("a"), ServerMetrics("b")
    first.responded(200)
    assert first.registry is not second.registry
    assert "paceline_http_responses_total" in _names(first) - _names(second)


def _names(metrics: ServerMetrics) -> set[str]:
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


def test_logs_for_programs_and_for_people() -> None:
    record = logging.LogRecord("paceline.access", logging.INFO, "", 0, "%s %s", ("GET", "/ü"), None)
    record.request_id, record.seconds = "abc", 0.25
    told = json.loads(JsonLines().format(record))
    assert told["message"] == "GET /ü" and told["request_id"] == "abc" and told["level"] == "info"
    assert TextLines().format(record).endswith("paceline.access: GET /ü 250.0 ms [abc]")
    try:
        raise ValueError("broken")
    except ValueError as problem:
        record.exc_info = (ValueError, problem, problem.__traceback__)
    assert "ValueError: broken" in json.loads(JsonLines().format(record))["exception"]
    assert "\n" not in JsonLines().format(record)
    assert "ValueError: broken" in TextLines().format(record)


def test_what_went_to_the_host_is_counted_and_what_is_there_is_shown() -> None:
    engine = tiny_engine(preemption="swap", enable_prefix_caching=False, swap_space=0.001)
    engine.add([5, 6, 7, 8] * 8, SamplingParams(max_tokens=8, temperature=0.0), request_id="one")
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    metrics = ServerMetrics("tiny")
    waiting = parse_metrics(metrics.exposition(engine_state(engine)).decode())
    blocks = waiting['paceline_host_blocks{kind="swapped"}']
    assert waiting["vllm:num_requests_swapped"] == waiting["vllm:num_requests_waiting"] == 1
    assert waiting["vllm:cpu_cache_usage_perc"] == blocks / engine.report()["swap_blocks"] > 0
    while engine.has_work:
        engine.step()
    after = parse_metrics(metrics.exposition(engine_state(engine)).decode())
    assert after["vllm:num_requests_swapped"] == after["vllm:cpu_cache_usage_perc"] == 0
    assert after['paceline_host_blocks_out_total{kind="swapped"}'] == blocks
    assert after['paceline_host_blocks_in_total{kind="swapped"}'] == blocks
    assert after['paceline_host_blocks_out_total{kind="prefix"}'] == 0


def test_a_cache_that_a_draft_model_has_of_its_own_is_one_of_the_engines() -> None:
    engine = tiny_engine()
    engine.draft_models.add("own", LoadedModel(engine.model, None, engine.kernels))
    assert engine.storages == [engine.storage]
    engine.add([5, 6, 7, 8], SamplingParams(max_tokens=4), speculation={"method": "draft", "model": "own"})
    while engine.has_work:
        engine.step()
    assert len(engine.storages) == 2 and all(storage.on_host for storage in engine.storages)
