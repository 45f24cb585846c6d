"""Chat templates: a conversation to the text the model was trained to continue."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, PacelineError, RequestError
from paceline.models.control_tokens import ControlTokens
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.gguf_checkpoint import GGUFCheckpoint
from paceline.models.load.reading import read_object, read_text
from paceline.models.tokenizer import Tokenizer, encoding

if TYPE_CHECKING:
    from paceline.models.bounded_templates import Limits
    from paceline.models.compiled_template import CompiledTemplate


class ChatTemplate:
    """A Jinja template as Hugging Face models carry them, rendered in a sandbox. Compiled on first use."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None, *,
                 tool_source: str | None = None, limits: Limits | None = None) -> None:
        self.source = source
        self.tool_source = tool_source
        """A second template that some models have for conversations with tools."""
        self.special_tokens = dict(special_tokens or {})
        self.limits = limits
        """Of one rendering; None: the usual ones."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, tokenizer: Tokenizer | None = None, file: str | None = None) -> ChatTemplate:
        """That of an operator's file, or the model's. A file that is broken is the operator's business, now and not at
        the first request."""
        if file is None:
            return cls.from_checkpoint(checkpoint, tokenizer)
        try:
            made = cls(read_text(Path(file).expanduser()), tokenizer.special_tokens if tokenizer else {})
            assert made._template is not None  # compiled
        except PacelineError as problem:
            raise ConfigError(f"The chat template {file} cannot be used: {problem}") from None
        return made

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """The model's template; a model without one gives a ChatTemplate whose render() says so."""
        tokens = tokenizer.special_tokens if tokenizer else {}
        if isinstance(checkpoint, GGUFCheckpoint):
            read = checkpoint.file.metadata
            return cls(read.text("tokenizer.chat_template", "") or None, tokens,
                       tool_source=read.text("tokenizer.chat_template.tool_use", "") or None)
        source, tool_source = _from_folder(checkpoint.path)
        return cls(source, tokens, tool_source=tool_source)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any) -> str:
        """The prompt for `messages` (each with at least a "role"), begin token included: ChatEncoder makes ids of it.
        `variables` reach the template. Every fault is a RequestError."""
        if self.source is None:
            raise RequestError("This model has no chat template: pass a prompt to generate instead of messages.",
                               "messages")
        _check(messages)
        template = self._tool_template if tools and self.tool_source else self._template
        return template.render({
            "messages": list(messages), "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt, **self.special_tokens, "documents": None, **variables})

    @cached_property
    def _template(self) -> CompiledTemplate:
        return _compile(self.source or "", self.limits)

    @cached_property
    def _tool_template(self) -> CompiledTemplate:
        return _compile(self.tool_source or "", self.limits)


class ChatEncoder:
    """Conversations as token ids: control tokens are what the template writes, and messages are text, whatever
    somebody wrote into them."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False,
               max_prompt_len: int | None = None, continue_final_message: bool = False, **variables: Any) -> list[int]:
        """As ChatTemplate.render takes them. `parse_special`: control tokens written in messages are control tokens.
        `max_prompt_len`: a conversation that cannot have as few tokens is refused before it is tokenised.
        `continue_final_message`: the prompt ends where the last message does."""
        end = _some_mark() if continue_final_message else None
        given = {"messages": messages if end is None else _marked(messages, end), **variables}
        if parse_special:
            whole = self._rendered_within(max_prompt_len, given, end)
            return self._tokenizer.encode(whole, add_special=False, parse_special=True)
        control = self._control  # the same one to the end: threads that are the first to ask may each make one
        try:
            guarded = control.guard(given)
        except RecursionError:
            raise RequestError("The messages or tools are nested too deep for a chat template: simplify them.",
                               "messages") from None
        text = self._rendered_within(max_prompt_len, guarded, end)
        with encoding():
            return control.encode_guarded(text)

    def _rendered_within(self, most: int | None, given: dict[str, Any], end: str | None) -> str:
        text = self._template.render(**given)
        if end is not None:
            text, found, _ = text.rpartition(end)
            if not found:
                raise RequestError("The chat template does not write the last message as it is, so nobody can go on "
                                   "with it: end with the user's, or leave continue_final_message out.",
                                   "continue_final_message")
        if most is not None:  # what counts is what the template made of it: it may have left old messages out
            self._tokenizer.check_length(text, most, "messages")
        return text

    @cached_property
    def _control(self) -> ControlTokens:
        """Special tokens, and those that turns are made of: not all files call them special."""
        names = self._tokenizer.control.names
        turns = [name for token in self._tokenizer.backend.get_added_tokens_decoder().values()
                 if (name := token.content) not in names and not name.isspace() and not name.isalnum()
                 and name in self._bare and not self._looks_for(name)]
        return ControlTokens(self._tokenizer.backend, [*names, *turns]) if turns else self._tokenizer.control

    @cached_property
    def _bare(self) -> str:
        """Conversations of next to nothing, by which to see what the template writes between messages."""
        return "".join(filter(None, map(self._rendered, (
            _turns(system="0", user="0", assistant="0") + _turns(user="0"),
            _turns(user="0", assistant="0") + _turns(user="0")))))

    def _looks_for(self, name: str) -> bool:
        """Whether the template makes something of this name where an assistant has written it (</think>, and what came
        before is left out): then it ends no turn, and has to be found."""
        control = ControlTokens(self._tokenizer.backend, [name])
        messages = _turns(user="0", assistant=f"0{name}1") + _turns(user="0")
        found = self._rendered(control.guard(messages))
        return found is not None and control.unmarked(found) != self._rendered(messages)

    def _rendered(self, messages: list[dict[str, str]]) -> str | None:
        with suppress(RequestError):  # some refuse system messages
            return self._template.render(messages, add_generation_prompt=False)
        return None


def _some_mark() -> str:
    """Characters for private use that nobody can guess: no template strips them or has another case for them."""
    return "".join(chr(0xF0000 + secrets.randbelow(0xFFF0)) for _ in range(8))


def _marked(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    """`mark` at the end of the last message."""
    _check(messages)
    last = messages[-1]
    if not isinstance(last.get("content"), str):
        raise RequestError("The last message has no text to go on with: leave continue_final_message out.",
                           "continue_final_message")
    return [*messages[:-1], {**last, "content": f"{last['content']}{mark}"}]


def _turns(**contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in contents.items()]


def _check(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of {'role': ..., 'content': ...}.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be an object with a 'role' (system, user, assistant), got "
                               f"{message!r}.", "messages")
        if message.get("content") is None and not message.keys() & {"tool_calls", "tool_call_id"}:
            raise RequestError(f"messages[{index}] has no 'content': give it a text.", "messages")


def _from_folder(folder: Path) -> tuple[str | None, str | None]:
    """(default template, template for tools). A chat_template.jinja file wins over tokenizer_config.json."""
    alone = folder / "chat_template.jinja"
    if alone.exists():
        return read_text(alone), None
    path = folder / "tokenizer_config.json"
    found = read_object(path).get("chat_template") if path.exists() else None
    if isinstance(found, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        return _source(by_name.get("default")), _source(by_name.get("tool_use"))
    return _source(found), None


def _source(found: Any) -> str | None:
    return found if isinstance(found, str) else None


def _compile(source: str, limits: Limits | None) -> CompiledTemplate:
    try:
        from paceline.models.compiled_template import CompiledTemplate
    except ImportError as error:
        raise RequestError("Chat needs the package jinja2 to render the model's template: install it, or pass a prompt "
                           "to generate instead.", "messages") from error
    return CompiledTemplate(source, limits)
