"""Questions behind a long text: how drafters fare where the context is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.bench.questions import Question
from paceline.bench.report import say
from paceline.bench.spec import prompt_of
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.measure.text_files import read_text


def behind(llm: LLM, questions: Sequence[Question], path: str, context: int, max_tokens: int) -> list[Question]:
    """Their first turns, each behind as much of a text as makes a prompt of `context` tokens (a few less where the text
    is split otherwise in the prompt, and so many less that the answer has room in the model's positions). All begin
    with the same text, so that the prefix cache computes it once. A question that is longer itself is left out."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ConfigError("This model came without a tokenizer: nothing can be asked behind a text.")
    length = min(context, llm.engine.config.max_model_len - max_tokens)
    tokens = tokenizer.encode(read_text(path), add_special=False)
    found = []
    for question in questions:
        long = _behind(llm, question, tokens, length)
        if long is None:
            say(f"acceptance: question {question.id} is left out behind {context} tokens: it has no room there itself")
        else:
            found.append(long)
    if not found:
        raise ConfigError(f"No question has room in {length} tokens: ask for a longer context.")
    return found


def _behind(llm: LLM, question: Question, tokens: Sequence[int], length: int) -> Question | None:
    assert llm.engine.tokenizer is not None
    count = length - _size(llm, question.turns[0])
    while count > 0:
        if count > len(tokens):
            raise ConfigError(f"The text has {len(tokens)} tokens, and a prompt of {length} needs {count} of it: give "
                              "a longer one.")
        turn = f"{llm.engine.tokenizer.decode(tokens[:count])}\n\n{question.turns[0]}"
        excess = _size(llm, turn) - length
        if excess <= 0:
            return replace(question, turns=(turn,))
        count -= excess
    return None


def _size(llm: LLM, turn: str) -> int:
    """Tokens of the prompt."""
    prompt = prompt_of(llm, [{"role": "user", "content": turn}])
    assert llm.engine.tokenizer is not None
    return len(llm.engine.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
