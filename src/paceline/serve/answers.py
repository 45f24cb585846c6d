"""How the answer to a chat is written and read: thoughts, text and calls, in the format its model was taught."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import GrammarError
from paceline.grammar.schemas import prepared
from paceline.models.chat import ChatTemplate
from paceline.models.tokenizer import Tokenizer
from paceline.request import SamplingParams
from paceline.serve import reasoning
from paceline.serve.conversation import must_call, named_tool, used_tools
from paceline.serve.schema import ChatBody
from paceline.serve.tool_formats import FORMATS, format_of
from paceline.serve.tool_formats.events import AnswerParser, CallsOnly, PlainText, UntilCallsEnd
from paceline.serve.tool_formats.format import ToolFormat
from paceline.serve.tool_formats.lark import Lark


@dataclass(frozen=True)
class Answers:
    """Of one chat. It travels with the request, to where its texts are made."""

    format: ToolFormat
    tools: Mapping[str, Mapping[str, Any]]
    """Those that may be called, with the schemas of their arguments."""
    forced: bool
    """The answer is a call, whatever the model would like."""
    most: int | None
    """Calls in an answer; None: any number."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Tags that are special tokens of this model, and their ids."""
    template: str | None = None
    thoughts: str = reasoning.NEVER

    @classmethod
    def of(cls, body: ChatBody, template: ChatTemplate | None, tokenizer: Tokenizer | None, named: str) -> Answers:
        """`named`: the format an operator chose, or "auto"."""
        source = None if template is None else template.source
        with_tools = source if template is None else template.tool_source or source
        chosen = format_of(with_tools) if named == "auto" else FORMATS[named]
        tags = (*chosen.tags, reasoning.OPEN, reasoning.CLOSE)
        forced = must_call(body)
        one = body.parallel_tool_calls is False or named_tool(body) is not None
        for tool in used_tools(body) if forced and body.strict_schema else ():
            prepared(tool.function.parameters, strict=True)
        return cls(chosen, {tool.function.name: tool.function.parameters or {"type": "object"}
                            for tool in used_tools(body)},
                   forced, 1 if one else None, _special(tags, tokenizer), source)

    def behind(self, prompt: Sequence[int], tokenizer: Tokenizer | None) -> Answers:
        """As it is after this prompt, which may have opened the model's thoughts."""
        if tokenizer is None or self.format.channels:
            return self
        end = tokenizer.decode(prompt[-reasoning.PROMPT_END:], skip_special=False)
        return replace(self, thoughts=reasoning.expected(self.template, end), template=None)

    @property
    def structure(self) -> dict[str, Any]:
        """The form that tool_choice demands of the text."""
        if not self.forced:
            return {}
        try:
            return {"grammar": self.format.grammar(self.tools, self.most, Lark(self.special))}
        except (GrammarError, TypeError, AttributeError) as problem:
            raise GrammarError(f"No grammar can be made of these tools: {problem}", "tools") from None

    def params(self, asked: SamplingParams) -> SamplingParams:
        """What the engine has to know: where a structure begins, which tokens to show, and when enough was said."""
        lark = Lark(self.special)
        before = None
        if asked.structure is not None:
            before = reasoning.before_message(self.forced, lark) if self.format.channels else reasoning.before_answer(
                self.thoughts, lark)
        reads = bool(self.tools) or self.format.channels
        shown = any(tag in self.special for tag in self.format.tags) if reads else False
        shown = shown or (self.thoughts != reasoning.NEVER and reasoning.CLOSE in self.special)
        ends = self.tools and not (self.forced or asked.searches or asked.trace)
        return replace(asked, structure_after=before, skip_special_tokens=asked.skip_special_tokens and not shown,
                       stop_when=self.watcher if ends else None)

    def parser(self) -> AnswerParser:
        """For one answer."""
        reader = self.format.parser(self.tools, self.most) if self.tools or self.format.channels else PlainText()
        if self.tools:
            reader = CallsOnly(reader, self.tools) if self.forced else UntilCallsEnd(reader)
        return reader if self.thoughts == reasoning.NEVER else self._thinking(reader)

    def watcher(self) -> Callable[[str], bool]:
        """Told each piece of an answer: whether all its calls have come."""
        parser = self.parser()

        def told(piece: str) -> bool:
            for _ in parser.push(piece):
                pass
            return parser.over

        return told

    def thought_tokens(self, tokens: Sequence[int], prompt: Sequence[int], tokenizer: Tokenizer | None) -> int:
        """How many of an answer's tokens are thoughts."""
        if tokenizer is None or (self.thoughts == reasoning.NEVER and not self.format.channels):
            return 0
        parser = self.format.parser({}, None) if self.format.channels else self._thinking(PlainText())
        stream, count = tokenizer.detokenizer(skip_special=False, after=prompt), 0
        for token in tokens:
            before = parser.thinking
            for _ in parser.push(stream.push(token)):
                pass
            count += before or parser.thinking
            if before and not parser.thinking and not self.format.channels:
                break
        return count

    def _thinking(self, inner: AnswerParser) -> AnswerParser:
        return reasoning.ThinkParser(inner, self.thoughts == reasoning.BEGUN)


def _special(tags: Sequence[str], tokenizer: Tokenizer | None) -> dict[str, int]:
    if tokenizer is None:
        return {}
    ids = {tag: tokenizer.backend.token_to_id(tag) for tag in tags}
    return {tag: token for tag, token in ids.items() if token in tokenizer.special_ids}
