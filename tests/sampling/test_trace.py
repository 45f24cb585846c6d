"""A trace survives the trip through JSON; whatever else the file holds is refused with a sentence."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.request import SamplingParams
from paceline.sampling.cycles import Cycle, Distribution
from paceline.sampling.setup import Setup
from paceline.sampling.trace import Trace, TraceToken, params_from_dict, params_to_dict


def example() -> Trace:
    params = SamplingParams(temperature=0.8, top_p=0.9, logit_bias={5: -math.inf, 7: 1.5}, stop=("x",),
                            allowed_token_ids=(1, 2, 7), max_tokens=None, trace=True)
    shared = Distribution(np.array([1, 7], dtype=np.int32), np.array([0.25, 1 / 3]))
    own = Distribution(np.array([2], dtype=np.int32), np.array([1e-300]))
    return Trace(Setup(model="abc"), [1, 2], params, 2**64 - 1, speculation={"method": "ngram", "k": 3},
                 rule="multi-round",
                 tokens=[TraceToken(7, 2, -0.25, -0.125, 3, ("logit_bias", "temperature", "top_p")),
                         TraceToken(1, 3, -1.5, -math.inf, 1, (), "ngram", "accepted")],
                 cycles=[Cycle(3, [7, 1, 2, 5], [-1, -1, 0, 2], "a", ["a", "b", "a", "a"], [shared, shared, own, None]),
                         Cycle(5, [4], [-1], "a")], cut=9, finish_reason="length")


def test_round_trip():
    text = example().to_json()
    assert Trace.from_json(text) == example()
    assert "Infinity" not in text
    first = Trace.from_json(text).cycles[0].q
    assert first is not None and first[0] is first[1]  # siblings that were sampled together stay together


def test_a_cycle_larger_than_any_that_is_kept_is_refused(monkeypatch):
    text = example().to_json()
    monkeypatch.setattr("paceline.sampling.cycles.MOST_NUMBERS", 2)
    with pytest.raises(RequestError, match="of cycle 0, its distributions have more numbers than a trace keeps"):
        Trace.from_json(text)


def test_parameters_round_trip_and_defaults_are_left_out():
    params = example().params
    assert params_from_dict(params_to_dict(params)) == params
    assert params_to_dict(SamplingParams()) == {}


def broken(**changes):
    document = json.loads(example().to_json())
    for path, value in changes.items():
        place = document
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("__"))
        for parent in parents:
            place = place[parent]
        if value is KeyError:
            del place[last]
        else:
            place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(("text", "says"), [
    ("{", "not valid JSON"),
    ("[]", "one object"),
    ("{}", "schema is None"),
    (broken(schema=99), "newer version of Paceline.*update"),
    (broken(schema=1), "schema is 1 and this version reads 3"),
    (broken(setup=KeyError), "lacks 'setup'"),
    (broken(setup__model=KeyError), "of the setup, it must be an object with model"),
    (broken(setup__deterministic="yes"), "deterministic must be bool"),
    (broken(setup__tokenizer=3), "tokenizer must be text or null"),
    (broken(setup__max_model_len=10**12), "max_model_len must be 0 to"),
    (broken(rule=3), "rule must be text"),
    (broken(cut=-1), "cut must be"),
    (broken(cycles=3), "cycles must be a list"),
    (broken(cycles__0=3), "of cycle 0, it must be an object"),
    (broken(cycles__1__start=0), "of cycle 1, start must be"),
    (broken(cycles__1__tokens=[]), "tokens must be 1 to"),
    (broken(cycles__0__parents__1=1), "parent that comes before it"),
    (broken(cycles__0__sources__1=None), "sources must be texts"),
    (broken(cycles__0__sources=["a"]), "sources must be texts"),
    (broken(cycles__0__q=[0]), "q must name a distribution for each token"),
    (broken(cycles__0__q__0=2), "no distribution 2"),
    (broken(cycles__0__q__0=1), "token 7 was drafted from a distribution that does not have it"),
    (broken(cycles__0__distributions__0="x"), "a distribution has tokens and chances"),
    (broken(cycles__0__distributions__0__chances="%"), "bytes in base64"),
    (broken(cycles__0__distributions__0__chances=""), "a chance for each"),
    (broken(cycles__0__distributions__1__chances="AAAAAAAA+H8="), "chances lie above 0"),
    (broken(extra=1), "unknown entry 'extra'"),
    (broken(adapter=3), "adapter must be text"),
    (broken(prompt=["a"]), "prompt must be a list of token ids"),
    (broken(prompt=[-1]), "prompt must be a list of token ids"),
    (broken(seed=2**64), "seed must be"),
    (broken(seed=True), "seed must be"),
    (broken(speculation="ngram"), "speculation must be"),
    (broken(tokens=3), "tokens must be a list"),
    (broken(tokens__0=3), "token 0 must be an object"),
    (broken(tokens__1__support=KeyError), "token 1 lacks 'support'"),
    (broken(tokens__1__position=-1), "position must be"),
    (broken(tokens__1__outcome="guessed"), "outcome must be one of"),
    (broken(tokens__1__raw_logprob="much"), "raw_logprob must be a number"),
    (broken(tokens__1__raw_logprob=None), "raw_logprob must be a number"),
    (broken(tokens__0__processors="top_p"), "processors must be a list"),
    (broken(params=[]), "params must be an object"),
    (broken(params__top_q=1), "no sampling parameter 'top_q'"),
    (broken(params__interrupt="x"), "no sampling parameter 'interrupt'"),
    (broken(params__top_p=0), "top_p must be above 0"),
    (broken(params__stop="x"), "stop must be a list"),
    (broken(params__logit_bias=[1]), "logit_bias must map"),
    (broken(params__temperature=10**400), "finite number"),
])
def test_bad_traces_are_refused(text, says):
    with pytest.raises(RequestError, match=says):
        Trace.from_json(text)


def test_a_structure_comes_back():
    assert params_from_dict({"regex": "a+"}).regex == "a+"
