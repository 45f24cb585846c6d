"""`paceline.cluster:app`: what `serve run` and `serve deploy` are given, and one such application on a real Ray."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CONTEXT, events

import paceline.cluster as cluster_package
from cluster.real_ray import WAIT
from paceline import LLM, SamplingParams
from paceline.cluster.family import descendants, end
from paceline.cluster.options import ClusterOptions
from paceline.errors import ConfigError, EngineError

pytest.importorskip("ray")

from ray import serve

from paceline.cluster import application, deploy
from paceline.cluster.application import FRONT_DRAIN_S, Front, app
from paceline.cluster.autoscaling import policy
from paceline.serve.options import ServeOptions

TEMPLATE = "{% for message in messages %}TEMPLATE {{ message['content'] }}{% endfor %}"


def test_the_name_stays_that_of_the_application() -> None:
    """Importing a module sets its name on the package: `serve run` may look twice."""
    assert callable(cluster_package.app) and cluster_package.app is cluster_package.app is app
    assert not hasattr(cluster_package, "nothing")


def test_values_may_be_texts() -> None:
    """As `serve run` hands them over."""
    front = app({"model": "m", "replicas": "3", "deterministic": "true", "drain_s": "7", "device": "cpu",
                 "chat_template": "a.jinja", "cors_origins": '["https://a.example"]'})
    made, prefill, model, settings, template = front._bound_deployment.init_args
    replica, = made._bound_deployment.init_args
    assert (prefill, model, template) == (None, "m", "a.jinja")
    assert settings.cors_origins == ("https://a.example",)
    assert made._bound_deployment.num_replicas == 3
    assert made._bound_deployment._deployment_config.graceful_shutdown_timeout_s == 7
    assert replica.engine["deterministic"] is True and replica.engine["chat_template"] == "a.jinja"


@pytest.mark.parametrize(("given", "seconds"), [({}, FRONT_DRAIN_S), ({"front_drain_s": "90", "drain_s": 7}, 90.0)])
def test_a_new_front_begins_before_the_old_one_has_ended(given: dict[str, Any], seconds: float) -> None:
    config = app({"model": "m", **given})._bound_deployment._deployment_config
    assert config.max_surge_percent == 100
    assert config.graceful_shutdown_timeout_s == seconds


def test_an_application_may_scale() -> None:
    front = app({"model": "m", "autoscale": "2:5", "device": "cpu"})
    scaling = front._bound_deployment.init_args[0]._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 2, 5)
    found = scaling.policy.get_policy()
    assert (found.__module__, found.__name__) == (policy.__module__, policy.__name__)


@pytest.mark.parametrize(("given", "sentence"), [
    ({"quota": {"requests_per_minute": 3}}, "an application has none"), ({"autoscale": "3"}, "MIN:MAX"),
    ({"replicas": 0}, "at least 1")])
def test_mistakes_are_told(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        app({"model": "m", **given})


@pytest.mark.parametrize(("problem", "times"), [(EngineError("No replica is there."), 3), (TimeoutError(), 3),
                                               (ConfigError("Another version."), 1)])
def test_a_front_waits_for_replicas_that_are_coming(folder: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception,
                                                    times: int) -> None:
    """Serve replaces all deployments at once. What will not become better is told."""
    tried: list[Any] = []

    def front(handles: Any, texts: Any, host: str) -> Any:
        tried.append((handles.serving, texts.chat.source, host))
        if len(tried) < 3:
            raise problem
        return "llm"

    monkeypatch.setattr(application, "front", front)
    monkeypatch.setattr(application.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(application.deploy, "node_address", lambda: "127.0.0.1")
    (template := folder / "template").write_text(TEMPLATE)
    made = object.__new__(Front)
    beginning = Front.__init__(made, "handle", None, str(folder), ServeOptions(), str(template))
    if times == 1:
        with pytest.raises(ConfigError, match="Another version"):
            asyncio.run(beginning)
    else:
        asyncio.run(beginning)
        assert made._llm == "llm"
    assert tried == [("handle", TEMPLATE, "127.0.0.1")] * times


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of Serve's proxy, on a Ray of this process's own."""
    port, start = free_port(), serve.start
    monkeypatch.setattr(deploy.serve, "start", lambda **given: start(
        http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"}))
    with deploy.running_ray(ClusterOptions(replicas=2, threads=1)):
        yield f"http://127.0.0.1:{port}"
    end(descendants())


def arguments(folder: Path, **more: str) -> dict[str, str]:
    return {"model": str(folder), "replicas": "1", "threads": "1", "deterministic": "true", "device": "cpu",
            "model_name": "tiny", "warm_up": "false", "page": "false", **more}


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


@pytest.mark.slow
def test_an_application_answers(folder: Path, alone: LLM, url: str, tmp_path: Path) -> None:
    (template := tmp_path / "template").write_text(TEMPLATE)
    serve.run(app(arguments(folder, chat_template=str(template))), name="paceline", route_prefix="/")
    asked = {"model": "tiny", "max_tokens": 8, "seed": 3, "temperature": 1.0, "ignore_eos": True,
             "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    output, = alone.generate(["TEMPLATE hello"], SamplingParams(max_tokens=8, seed=3, temperature=1.0, ignore_eos=True))
    assert answer.json()["choices"][0]["message"]["content"] == output.outputs[0].text
    assert answer.json()["usage"]["prompt_tokens"] == len(output.prompt_token_ids)


@pytest.mark.slow
@pytest.mark.full
def test_a_stream_outlives_its_front(folder: Path, alone: LLM, url: str) -> None:
    """Another deployment replaces all there is, and nobody is refused meanwhile. The stream goes on for longer than a
    replica may take to drain."""
    given = arguments(folder, drain_s="2", speculation="null")
    serve.run(app(given), name="paceline", route_prefix="/")
    seen: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            answer = httpx.get(f"{url}/v1/models", timeout=WAIT)
            seen.append(answer.json()["data"][0]["id"] if answer.status_code == 200 else str(answer.status_code))

    def change() -> None:
        serve.run(app(given | {"model_name": "other"}), name="paceline", route_prefix="/")

    threads = [threading.Thread(target=act) for act in (watch, change)]
    params: dict[str, Any] = {"max_tokens": CONTEXT - 100, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    text, replaced = "", None
    with httpx.stream("POST", f"{url}/v1/completions", timeout=WAIT, json={
            "model": "tiny", "prompt": "Once", "stream": True, **params}) as response:
        for number, event in enumerate(events(response)):
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            if number == 3:
                for one in threads:
                    one.start()
            if replaced is None and "other" in seen:
                replaced = time.monotonic()
            if replaced is not None and time.monotonic() > replaced + 6.0:
                break
        else:
            raise AssertionError("the stream was too short to tell anything")
    over.set()
    for one in threads:
        one.join(WAIT)
    assert set(seen) == {"tiny", "other"}
    said = ""
    for output in alone.stream("Once", SamplingParams(**params)):
        said = output.outputs[0].text
        if len(said) >= len(text):
            break
    assert said.startswith(text)
