"""The equality matrix with drafters that have learned their target: the tiny family's heads and its draft model have
drafts accepted in every cell, greedy or sampled with all controls, and every text is that of plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import matrix
from paceline.engine.drafting import heads as drafting
from paceline.errors import ConfigError, PacelineError
from paceline.kernels import cpu
from paceline.models.heads.slots import SlotChain
from paceline.models.load.reading import read_json
from paceline.request import SamplingParams
from subjects import UNTRAINED, FamilySubject, RandomSubject

FAMILY = Path(__file__).parents[1] / "family"
KINDS = ("dspark", "eagle3", "mtp", "medusa", "hydra")
NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
TARGETS: dict[str, dict[str, Any]] = {
    "int8, int8 cache": {"kernels": "native", "adapts": False},
    "int8, float cache": {"kernels": "native", "kv_dtype": "float32", "adapts": False},
    "int8, layers in torch": {"kernels": "native"},
    "floats": {"kernels": "reference"},
    "device, fp8 cache": {"kernels": "stepped", "kv_dtype": "fp8"},
}
CELLS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "int8, int8 cache": (matrix.TRAINED, ("greedy", "controlled"), ("alone", "preempted", "warm")),
    "int8, float cache": (matrix.TRAINED, ("greedy", "seeded", "random"), ("chunks", "swapped")),
    "int8, layers in torch": (KINDS, ("greedy",), ("adapters",)),
    "floats": (KINDS, ("greedy", "controlled"), ("ahead",)),
    "device, fp8 cache": (KINDS, ("greedy",), ("adapters",)),
}
"""Drafters, styles and circumstances of every run; the whole product is run with the long matrices."""


@functools.cache
def subject(name: str) -> FamilySubject:
    torch.set_num_threads(1)
    return FamilySubject.of(FAMILY, "cpu", "float32", **TARGETS[name])


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (NATIVE,) if TARGETS[name]["kernels"] == "native" else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CELLS])
def test_trained_drafters_are_accepted_and_change_nothing(name: str) -> None:
    assert matrix.run(subject(name), *CELLS[name], count=12, least=matrix.LEAST)["differences"] == []


def test_what_cannot_run_is_named_with_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    small = RandomSubject.small("cpu", "float32", vocab_size=97, hidden_size=32, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=16, intermediate_size=48, num_hidden_layers=1)
    small = dataclasses.replace(small, kernels="reference")
    result = matrix.run(small, ["ngram", "merge of heads", "dflash"], ["greedy"], ["crowd"], 4)
    assert result["skipped"] == {"merge of heads": "no trained head 'eagle3'", "dflash": "no trained head 'dflash'"}
    assert "matrix: dflash skipped: no trained head 'dflash'" in capsys.readouterr().err
    assert "dflash: skipped, no trained head 'dflash'" in matrix.table(result)
    with pytest.raises(ConfigError, match="Nothing of what was asked for can run"):
        matrix.run(small, ["dflash"], ["greedy"], ["crowd"], 4)


@pytest.mark.parametrize("to", ["int4", *(pytest.param(to, marks=pytest.mark.full) for to in ("int8", "awq"))])
def test_the_command_with_a_quantised_target(to: str, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """As on a card: its steps, an fp8 cache, heads that were trained and heads that were not."""
    drafters = ("dspark", "dflash", "eagle3", "eagle1", "precision", "plain")
    command = ["matrix", "--family", str(FAMILY), "--quantization", to, "--kv-dtype", "fp8", "--device", "cpu",
               "--dtype", "float32", "--kernels", "stepped", "--styles", "greedy", "--circumstances", "crowd",
               "--drafters", ",".join(drafters), "--tokens", "8", "--json", "-"]
    monkeypatch.setattr("sys.argv", command)
    matrix.main()
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["subject"] == f"tiny family, {to}" and result["skipped"] == {}
    notes = {row["case"].split(" / ")[0]: row["note"] for row in result["rows"]}
    assert tuple(notes) == drafters
    assert all(int(notes[kind].split(", ")[1].split()[0]) > 0 for kind in ("dspark", "eagle3", "precision")), notes
    monkeypatch.setattr("sys.argv", ["matrix", "--quantization", to])
    with pytest.raises(SystemExit, match="rounds a model that is stored"):
        matrix.main()


def test_random_heads_draft_in_every_step_and_are_sometimes_right() -> None:
    one = subject("floats")
    assert one.untrained == {*UNTRAINED}
    llm = one.llm(kv_blocks=200, block_size=8)
    prompts = [one.prompt(seed) for seed in range(8)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.2, seed=seed) for seed in range(8)]
    for kind in UNTRAINED:
        outs = llm.generate(prompts, params, speculation={"method": kind, "k": 4, "adaptive": False})
        stats = [out.speculation for out in outs]
        assert all(stat.failure is None and stat.drafted > 24 for stat in stats)
        assert sum(stat.accepted for stat in stats) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CELLS])
@pytest.mark.parametrize("circumstance", matrix.CIRCUMSTANCES)
def test_every_drafter_in_every_cell(name: str, circumstance: str) -> None:
    drafters = KINDS if name.startswith("device") else tuple(matrix.WISHES)
    found = matrix.run(subject(name), drafters, circumstances=[circumstance], count=24, least=matrix.LEAST)
    assert found["differences"] == []


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"],
          "additionalProperties": False}


@pytest.mark.parametrize("name", [pytest.param("int8, int8 cache", marks=NATIVE),
                                  pytest.param("floats", marks=pytest.mark.full)])
def test_words_and_structures_of_trained_drafters(name: str) -> None:
    """Words kept out and stopped at, and structures, a request of each for each kind, all at once."""
    one = subject(name)
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0, "bad_words": [" the", " and"], "max_tokens": 16},
        {"temperature": 0.3, "stop": ["ed", " a"], "max_tokens": 16},
        {"temperature": 0.0, "regex": "( [a-z]+){4,6}\\.", "max_tokens": 20},
        {"temperature": 0.7, "json_schema": SCHEMA, "max_tokens": 20}]
    cells = [(kind, style) for kind in KINDS for style in styles]
    prompts = [one.prompt(number) for number, _ in enumerate(cells)]
    params = [SamplingParams(seed=number, **style) for number, (_, style) in enumerate(cells)]
    llm = one.llm(kv_blocks=200, block_size=8)
    plain = llm.generate(prompts, params, speculation=None)
    outs = llm.generate(prompts, params, speculation=[{"method": kind, "k": 4, "adaptive": False} for kind, _ in cells])
    free = llm.generate(prompts, [SamplingParams(temperature=own.temperature, seed=own.seed, max_tokens=own.max_tokens)
                                  for own in params], speculation=None)
    changed: Counter[str] = Counter()
    for (kind, style), out, want, other in zip(cells, outs, plain, free):
        assert [part.token_ids for part in out.outputs] == [part.token_ids for part in want.outputs], (kind, style)
        assert out.speculation.failure is None and out.error is None
        changed[list(style)[1]] += out.outputs[0].text != other.outputs[0].text
    assert len(changed) == 4 and min(changed.values()) >= 2, changed
    accepted = {origin.drafter for out in outs for origin in out.speculation.provenance}
    assert {*KINDS} <= accepted


def test_a_cell_without_accepted_drafts_is_no_proof() -> None:
    with pytest.raises(PacelineError, match=r"dspark / crowd: of 1, .* this cell proves nothing"):
        matrix.run(subject("floats"), ["dspark"], ["greedy"], ["crowd"], 4, least=2.0)


@pytest.mark.parametrize("name", [pytest.param("int8, int8 cache", marks=NATIVE), "floats"])
def test_after_a_prefix_hit_as_much_is_accepted_as_after_a_cold_start(name: str) -> None:
    one = subject(name)
    wishes = [{"method": kind, "k": 4, "adaptive": False} for kind in KINDS]
    prompts = [one.prompt(seed) for seed in range(len(KINDS))]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.3 * (seed % 2), seed=seed)
              for seed in range(len(KINDS))]

    def counted(llm: Any) -> list[tuple[list[int], int, int]]:
        outs = llm.generate(prompts, params, speculation=wishes)
        return [(out.outputs[0].token_ids, out.speculation.drafted, out.speculation.accepted) for out in outs]

    cold = counted(one.llm(enable_prefix_caching=False, kv_blocks=64, block_size=8))
    warm = one.llm(kv_blocks=64, block_size=8)
    assert counted(warm) == cold
    before = warm.engine.cache.usage().hits
    assert counted(warm) == cold and warm.engine.cache.usage().hits >= before + len(KINDS)
    assert min(accepted for _, _, accepted in cold) > 0, [accepted for _, _, accepted in cold]


def test_the_family_is_small_and_names_nobodys_folders() -> None:
    assert sum(file.stat().st_size for file in FAMILY.rglob("*") if file.is_file()) < 6_000_000
    for kind in KINDS:
        written = read_json(FAMILY / kind / "config.json")
        assert written["speculators_config"]["verifier"]["name_or_path"] == "tiny family"


@NATIVE
@pytest.mark.parametrize("controls", [{}, {"top_p": 0.9}, {"top_k": 1}], ids=["plain", "top-p", "top-k 1"])
def test_what_is_drawn_in_one_call_is_accepted_like_what_is_drawn_token_by_token(
        controls: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the target's noise at the right places: one place off, and hardly anything would be."""
    one, count = subject("int8, int8 cache"), 16
    prompts = [one.prompt(seed) for seed in range(count)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=seed, **controls)
              for seed in range(count)]
    found, calls = {}, []
    chain = SlotChain.chain

    def counted(self: SlotChain, *given: Any) -> Any:
        calls.append(given)
        return chain(self, *given)

    monkeypatch.setattr(SlotChain, "chain", counted)
    for drawn in (False, True):
        with monkeypatch.context() as patch:
            if not drawn:
                patch.setattr(drafting, "_is_drawn", lambda seq: False)
            outs = one.llm(kv_blocks=400, block_size=8).generate(
                prompts, params, speculation={"method": "dspark", "k": 3, "adaptive": False})
        found[drawn] = [out.outputs[0].token_ids for out in outs], sum(out.speculation.accepted for out in outs)
        assert bool(calls) == drawn
    assert found[True][0] == found[False][0]
    assert found[True][1] >= 0.85 * found[False][1] > 0
