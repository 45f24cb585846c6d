"""What a request brings along to end its texts, and special tokens in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grammar.structured import PROMPT, TOOL, structured_llm, token
from paceline import SamplingParams
from paceline.errors import RequestError


def counting(most: int) -> Callable[[], Callable[[str], bool]]:
    def make() -> Callable[[str], bool]:
        said: list[str] = []

        def told(piece: str) -> bool:
            said.append(piece)
            return len("".join(said)) >= most

        return told

    return make


@pytest.mark.parametrize("speculation", [None, "auto"])
def test_each_sample_ends_when_it_has_said_enough(speculation: Any) -> None:
    llm = structured_llm()
    asked = {"max_tokens": 40, "n": 2, "seed": 3, "regex": "[a-z]{30}"}
    plain = llm.generate([PROMPT], SamplingParams(**asked), speculation=speculation)[0].outputs
    cut = llm.generate([PROMPT], SamplingParams(**asked, stop_when=counting(7)), speculation=speculation)[0].outputs
    for whole, begun in zip(plain, cut):
        assert begun.finish_reason == "stop" and 7 <= len(begun.text) < 30 and whole.text.startswith(begun.text)


def test_one_that_fails_fails_its_own_request() -> None:
    def broken() -> Callable[[str], bool]:
        return lambda piece: bool(1 // 0)

    llm = structured_llm()
    bad, good = llm.generate([PROMPT] * 2, [SamplingParams(max_tokens=20, seed=1, stop_when=broken),
                                            SamplingParams(max_tokens=20, seed=1)])
    assert isinstance(bad.error, RequestError) and "stop_when" in str(bad.error) and good.error is None
    with pytest.raises(RequestError, match="stop_when"):
        SamplingParams(stop_when=3)  # type: ignore[arg-type]


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    llm = structured_llm()
    for skip, text in ((True, "ab"), (False, f"a{TOOL}b")):
        params = SamplingParams(grammar=f'start: "a" <[{token(TOOL)}]> "b"', skip_special_tokens=skip, max_tokens=9)
        for speculation in (None, "auto"):
            out = llm.generate([PROMPT], params, speculation=speculation)[0]
            assert out.error is None and out.outputs[0].text == text and token(TOOL) in out.outputs[0].token_ids
