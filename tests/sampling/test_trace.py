"""A trace survives the trip through JSON; whatever else the file holds is refused with a sentence."""

from __future__ import annotations

import json
import math

import pytest

from paceline.errors import RequestError
from paceline.request import SamplingParams
from paceline.sampling.trace import Trace, TraceToken, params_from_dict, params_to_dict


def example() -> Trace:
    params = SamplingParams(temperature=0.8, top_p=0.9, logit_bias={5: -math.inf, 7: 1.5}, stop=("x",),
                            allowed_token_ids=(1, 2, 7), max_tokens=None, trace=True)
    return Trace(model="abc", prompt=[1, 2], params=params, seed=2**64 - 1, speculation={"method": "ngram", "k": 3},
                 tokens=[TraceToken(7, 2, -0.25, -0.125, 3, ("logit_bias", "temperature", "top_p")),
                         TraceToken(1, 3, -1.5, -math.inf, 1, (), "ngram", "accepted")], finish_reason="length")


def test_round_trip():
    text = example().to_json()
    assert Trace.from_json(text) == example()
    assert "Infinity" not in text


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
    (broken(schema=99), "schema is 99"),
    (broken(model=KeyError), "lacks 'model'"),
    (broken(extra=1), "unknown entry 'extra'"),
    (broken(model=3), "model must be text"),
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
