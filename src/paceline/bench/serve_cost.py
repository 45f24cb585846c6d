"""What serving costs against offline `generate`, and a soak with clients that come and go."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from paceline.bench.report import Row, document, emit, json_argument, percentile, say
from paceline.bench.serving.own_server import scrape, server
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.request import SamplingParams

PROMPTS = (
    "The history of the bicycle begins", "def quicksort(values):\n", "Dear Sir or Madam,\n\nI am writing to",
    "Once upon a time, in a village by the sea,", "The three laws of thermodynamics are", "Q: What is the capital of "
    "France?\nA:", "Ingredients for four people:\n- 500 g", "import numpy as np\n\n", "In this paper we propose",
    "The quick brown fox jumps over the lazy dog. " * 12, "Breaking news: scientists have", "To be, or not to be,",
)
"""Short and long, prose and code; one is longer than a few cache blocks."""
TEMPERATURE = 0.8


def load(host: str, port: int, **plan: Any) -> dict[str, Any]:
    """Run the load generator in its own process; what it saw."""
    done = subprocess.run([sys.executable, "-m", "paceline.bench.serve_client"], capture_output=True, text=True,
                          input=json.dumps(plan | {"host": host, "port": port}), check=False)
    if done.returncode:
        raise PacelineError(f"The load generator failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """What a process has used so far; 0 where the system does not tell."""
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bodies(prompts: list[str], **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "stream": True, "temperature": TEMPERATURE, **more} for prompt in prompts]


def cost(llm: LLM, host: str, port: int, process: subprocess.Popen[str], streams: int, new_tokens: int,
         repeats: int) -> list[Row]:
    """Tokens a second of the same requests, offline and through the server, in turns; the best of each."""
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(streams)]
    params = SamplingParams(max_tokens=new_tokens, temperature=TEMPERATURE, seed=1, ignore_eos=True)
    plan = {"kind": "burst", "bodies": bodies(prompts, max_tokens=new_tokens, seed=1, ignore_eos=True)}
    tokens = streams * new_tokens
    offline = served = adjusted = client = used = 0.0
    cores = os.cpu_count() or 1
    for turn in range(repeats + 1):
        say(f"serve-cost: {streams} streams, run {turn} of {repeats}")
        started = time.perf_counter()
        llm.generate(prompts, params)
        alone = tokens / (time.perf_counter() - started)
        before = cpu_seconds(process)
        seen = load(host, port, **plan)
        problems = [one["error"] for one in seen["exchanges"] if one["error"]]
        if problems:
            raise PacelineError(f"The server refused a request: {problems[0]}")
        if turn:
            offline = max(offline, alone)
            rate = tokens / seen["elapsed_s"]
            if rate > served:
                served, client, used = rate, seen["cpu_s"], cpu_seconds(process) - before
                adjusted = tokens / (seen["elapsed_s"] - seen["cpu_s"] / cores)
    note = f"{streams} streams of {new_tokens} tokens; peer: the same requests with LLM.generate in one process"
    return [Row("serve_rate", "tok/s", served, {"offline": offline}, note=note),
            Row("serve_rate_client_deducted", "tok/s", adjusted, {"offline": offline},
                note=f"the load client's {client:.2f} s of CPU, spread over {cores} cores, taken off the time; the "
                     f"server used {used:.2f} s of CPU")]


def quantile(histogram: dict[float, float], share: float) -> float:
    """Of a Prometheus histogram {upper bound: count up to it}, straight lines inside a bucket."""
    total = max(histogram.values(), default=0.0)
    low = seen = 0.0
    for bound, count in sorted(histogram.items()):
        if count >= share * total:
            return low if count == seen else low + (bound - low) * (share * total - seen) / (count - seen)
        low, seen = bound, count
    return low


def lags(found: dict[str, float]) -> dict[float, float]:
    return {float(name.split('le="')[1].split('"')[0]): value for name, value in found.items()
            if name.startswith("paceline_event_loop_lag_seconds_bucket") and "+Inf" not in name}


def differing(llm: LLM, exchanges: list[dict[str, Any]]) -> int:
    """How many completed texts are not what `generate` gives for the same seed."""
    asked = [one["body"] for one in exchanges]
    outs = llm.generate([body["prompt"] for body in asked], [
        SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
        for body in asked])
    return sum(out.outputs[0].text != one["text"] for out, one in zip(outs, exchanges))


def soak(llm: LLM, host: str, port: int, clients: int, seconds: float) -> list[Row]:
    """Clients that ask, stream, and sometimes hang up. Every row but the rates and times should be 0."""
    say(f"serve-cost: {clients} clients for {seconds:g} s")
    before = lags(scrape(f"http://{host}:{port}"))
    seen = load(host, port, kind="soak", clients=clients, seconds=seconds, cancel=0.2, seed=6, lengths=[8, 96],
                bodies=bodies(list(PROMPTS)))
    after = scrape(f"http://{host}:{port}")
    for _ in range(100):  # the last clients to hang up may not have been noticed yet
        if not after["vllm:num_requests_running"] and not after["vllm:num_requests_waiting"]:
            break
        time.sleep(0.1)
        after = scrape(f"http://{host}:{port}")
    lag = {bound: count - before.get(bound, 0.0) for bound, count in lags(after).items()}
    done = [one for one in seen["exchanges"] if not one["hung_up"] and one["error"] is None]
    errors = [one["error"] for one in seen["exchanges"] if one["error"]]
    say(f"serve-cost: comparing {len(done)} texts with offline ones")
    firsts = [one["times"][0] for one in done if one["times"]]
    gaps = [(one["times"][-1] - one["times"][0]) / (one["tokens"] - 1) for one in done
            if one["times"] and one["tokens"] and one["tokens"] > 1]
    about = f"{clients} clients, {seconds:g} s, {len(done)} completed, " \
            f"{sum(one['hung_up'] for one in seen['exchanges'])} hung up"

    def lower(case: str, unit: str, value: float, note: str = "") -> Row:
        return Row(case, unit, value, higher_is_better=False, note=note)

    return [lower("soak_errors", "requests", len(errors), f"{about}{'; first: ' + str(errors[0]) if errors else ''}"),
            lower("soak_blocks_left", "blocks", after['paceline_cache_blocks{state="used"}']),
            lower("soak_texts_that_differ", "texts", differing(llm, done)),
            lower("soak_loop_lag_p99", "ms", 1e3 * quantile(lag, 0.99), "how late the server's event loop was"),
            *(lower(f"soak_ttft_p{share}", "ms", 1e3 * percentile(firsts, share / 100)) for share in (50, 90, 99)),
            *(lower(f"soak_tpot_p{share}", "ms", 1e3 * percentile(gaps, share / 100)) for share in (50, 90, 99)),
            Row("soak_rate", "tok/s", sum(one["tokens"] or 0 for one in done) / seen["elapsed_s"],
                note=f"tokens of completed requests; the load client used {seen['cpu_s']:.1f} s of CPU")]


def run(model: str | None = None, clients: int = 64, seconds: float = 120.0, streams: int = 8, new_tokens: int = 128,
        repeats: int = 3, speculation: str = "none") -> dict[str, Any]:
    llm = LLM(model, speculation=None if speculation == "none" else speculation)
    with server(model, speculation) as (host, port, process):
        rows = cost(llm, host, port, process, streams, new_tokens, repeats) if repeats else []
        rows += soak(llm, host, port, clients, seconds) if seconds else []
    return document(rows, model=model or "default", clients=clients, seconds=seconds, streams=streams,
                    new_tokens=new_tokens, repeats=repeats, speculation=speculation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.serve_cost", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speculation", default="none")
    json_argument(parser)
    given = parser.parse_args()
    emit(run(given.model, given.clients, given.seconds, given.streams, repeats=given.repeats,
             speculation=given.speculation), given.json)


if __name__ == "__main__":
    main()
