"""Adapters over HTTP: each is a model of its own to clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import NAME, WAIT, ServerProcess, events, served, write_model

from adapters.adapter_files import ATTENTION, factors, shapes_of, tiny_model, write_adapter
from engine.tiny import tiny_engine
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.cli import options
from paceline.cli.main import main
from paceline.errors import ConfigError

MODEL = tiny_model()
PROMPT = [(i * 13 + 2) % 97 for i in range(20)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = factors(shapes_of(MODEL, ATTENTION), "served")
    return write_adapter(tmp_path_factory.mktemp("adapter"), tensors, target_modules=ATTENTION)


def engine_with(adapter: Path, name: str = "pirate") -> Any:
    engine = tiny_engine(MODEL)
    engine.adapters.load(name, str(adapter))
    return engine


@pytest.fixture(scope="module")
def url(adapter: Path) -> Iterator[str]:
    with served(engine_with(adapter)) as where:
        yield where


@pytest.fixture(scope="module")
def offline(adapter: Path) -> dict[str, list[int]]:
    llm = LLM.from_engine(engine_with(adapter))
    params = SamplingParams(max_tokens=12, temperature=0.0)
    outs = llm.generate([PROMPT] * 2, params, adapter=[None, "pirate"])
    tokens = [out.outputs[0].token_ids for out in outs]
    assert tokens[0] != tokens[1]
    return {NAME: tokens[0], "pirate": tokens[1]}


def test_models_lists_the_adapter_below_its_model(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models", timeout=WAIT).json()["data"]
    assert [(card["id"], card["parent"]) for card in listed] == [(NAME, None), ("pirate", NAME)]
    assert httpx.get(f"{url}/v1/models/pirate", timeout=WAIT).json() == listed[1]
    assert httpx.get(f"{url}/v1/models/parrot", timeout=WAIT).status_code == 404


@pytest.mark.parametrize("name", [NAME, "pirate"])
def test_the_models_name_chooses(url: str, offline: dict[str, list[int]], name: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"model": name, "provenance": True}, timeout=WAIT).json()
    assert answer["model"] == name
    assert [token["id"] for token in answer["choices"][0]["tokens"]] == offline[name]


def test_streams_too(url: str, offline: dict[str, list[int]]) -> None:
    body = BODY | {"model": "pirate", "provenance": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as response:
        chunks = list(events(response))
    assert {chunk["model"] for chunk in chunks} == {"pirate"}
    tokens = [token["id"] for chunk in chunks for choice in chunk["choices"] for token in choice.get("tokens", [])]
    assert tokens == offline["pirate"]


def test_an_unknown_name_is_told_what_there_is(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"model": "parrot"}, timeout=WAIT)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["param"] == "model" and "'pirate'" in error["message"]


def test_an_adapter_cannot_have_the_models_name(adapter: Path) -> None:
    with pytest.raises(ConfigError, match="both called 'tiny'"), served(engine_with(adapter, NAME)):
        pass


def test_async_requests_name_adapters(adapter: Path, offline: dict[str, list[int]]) -> None:
    async def ask() -> list[int]:
        llm = AsyncLLM(engine=engine_with(adapter))
        try:
            out = await llm.complete(PROMPT, SamplingParams(max_tokens=12, temperature=0.0), adapter="pirate")
            async for last in llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0), adapter="pirate"):
                snapshot = last
            assert snapshot.outputs[0].token_ids == out.outputs[0].token_ids
            return out.outputs[0].token_ids
        finally:
            llm.close()

    assert asyncio.run(ask()) == offline["pirate"]


@pytest.mark.parametrize(("option", "says"), [("pirate", "NAME=FOLDER"), ("pirate=/no/such/folder", "/no/such/folder")])
def test_the_command_refuses_before_it_loads_a_model(option: str, says: str, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0", "--lora", option]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.full
def test_the_command_serves_adapters(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with_tokenizer = LLM(str(model), deterministic=True)
    tensors = factors(shapes_of(with_tokenizer.engine.model, ATTENTION), "command")
    folder = write_adapter(tmp_path / "adapter", tensors, target_modules=ATTENTION)
    with_tokenizer.load_adapter("pirate", str(folder))
    params = SamplingParams(max_tokens=8, temperature=0.0)
    want = with_tokenizer.chat([{"role": "user", "content": "ahoy"}], params, adapter="pirate")[0].outputs[0]
    process = ServerProcess(model, tmp_path / "log", "--deterministic", "--lora", f"pirate={folder}", "--no-page")
    try:
        answer = httpx.post(f"{process.url}/v1/chat/completions", timeout=WAIT, json={
            "model": "pirate", "messages": [{"role": "user", "content": "ahoy"}], "max_tokens": 8, "temperature": 0})
        assert answer.json()["choices"][0]["message"]["content"] == want.text
        assert answer.json()["model"] == "pirate"
    finally:
        assert process.stop() == 0


def test_what_the_option_stands_for() -> None:
    assert options.adapters(None) is None
    assert options.adapters(["a=x", "b=y=z"]) == {"a": "x", "b": "y=z"}
    for wrong, said in ((["a"], "NAME=FOLDER"), (["=x"], "NAME=FOLDER"), (["a=x", "a=y"], "twice")):
        with pytest.raises(ConfigError, match=said):
            options.adapters(wrong)
