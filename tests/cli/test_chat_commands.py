"""The /commands of a chat, what Tab offers, and blocks of several lines."""

from __future__ import annotations

import base64
import errno
import io
import json
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from cli.test_chat import talk
from paceline.cli.chat import switcher
from paceline.cli.chat_commands import COMMANDS, SETTINGS, completions
from paceline.cli.chat_input import read_message
from paceline.cli.conversation import Conversation
from paceline.cli.main import main
from paceline.errors import ModelNotFoundError
from paceline.request import SamplingParams


@pytest.fixture
def chat(fake_llm):
    out = Console(file=io.StringIO(), highlight=False, width=200)
    return Conversation(fake_llm(), SamplingParams(max_tokens=None), out)


def test_help_names_every_command(chat):
    shown = talk(chat, "/help")
    assert all(command.usage in shown for command in COMMANDS.values()) and '"""' in shown


def test_a_saved_conversation_can_be_loaded(chat, tmp_path):
    talk(chat, "/system Be brief.", "hello", f"/save {tmp_path}/talk.json")
    before = chat.messages
    assert "3 messages loaded" in talk(chat, "/system", f"/load {tmp_path}/talk.json")
    assert chat.messages == before and chat.system == "Be brief."


@pytest.mark.parametrize("content", [None, "no json", '{"messages": 3}', '[{"role": "king", "content": "x"}]',
                                     '[{"role": "user", "content": 3}]'])
def test_a_file_without_a_conversation_changes_nothing(content, chat, tmp_path, capsys):
    path = tmp_path / "talk.json"
    if content is not None:
        path.write_text(content)
    talk(chat, "hello", f"/load {path}", "/save", f"/save {tmp_path}/no/folder")
    assert len(chat.messages) == 2
    assert capsys.readouterr().err.count("error:") == 3


@pytest.mark.parametrize("line", ["/save ~nobody-here/x", "/load ~nobody-here/x", "/save a\0b", "/load a\0b",
                                  "/load /dev/zero", "/set temperature " + "[" * 100_000])
def test_what_cannot_be_does_not_end_the_chat(line, chat, monkeypatch, capsys):
    monkeypatch.setattr("paceline.cli.conversation._MOST_BYTES", 1 << 16)
    talk(chat, "hello", line, "and now?")
    assert len(chat.messages) == 4 and capsys.readouterr().err.count("error:") == 1
    assert line.startswith("/load /dev") or not completions(line[:20])


def test_half_a_character_is_not_loaded(chat, tmp_path, capsys):
    (tmp_path / "talk.json").write_text(r'[{"role": "user", "content": "\ud800"}]')
    talk(chat, f"/load {tmp_path}/talk.json", f"/save {tmp_path}/talk.json")
    assert not chat.messages and "holds no conversation" in capsys.readouterr().err


def test_a_disk_that_is_full_keeps_what_was_saved(chat, tmp_path, monkeypatch, capsys):
    talk(chat, "hello", f"/save {tmp_path}/talk.json")
    before = (tmp_path / "talk.json").read_text()

    def full(path, text, **_):
        with open(path, "w") as file:
            file.write(text[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    talk(chat, "and now?", f"/save {tmp_path}/talk.json")
    assert (tmp_path / "talk.json").read_text() == before and "No space left" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["talk.json"]


def test_set_changes_how_the_next_answer_is_made(chat, capsys):
    shown = talk(chat, "/set temperature 0.5", "/set max-tokens 9", "/set stop END", "/set seed 3", "/set seed none",
                 "/set top_p 7", "/set colour red", "/set", "hello")
    params = chat.llm.asked[-1][1]
    assert (params.temperature, params.max_tokens, params.stop, params.seed, params.top_p) == (
        0.5, 9, ("END",), None, 1.0)
    assert all(f"\n{name} " in shown for name in SETTINGS)
    assert "top_p must be" in (said := capsys.readouterr().err) and "/set takes a key" in said


def test_retry_asks_the_last_question_again(chat, capsys, monkeypatch):
    talk(chat, "/retry")
    assert "Nothing was asked" in capsys.readouterr().err
    talk(chat, "hello")
    monkeypatch.setattr(type(chat.llm), "answer", "Another answer.")
    talk(chat, "/retry")
    assert [one["content"] for one in chat.messages] == ["hello", "Another answer."]


def test_a_retry_that_fails_keeps_the_old_answer(chat, monkeypatch):
    talk(chat, "hello")
    before = list(chat.messages)
    chat.messages[0] = {"role": "user", "content": "bad"}
    talk(chat, "/retry")
    assert chat.messages == [{"role": "user", "content": "bad"}, before[1]]


def test_copy_hands_the_last_answer_to_the_terminal(chat, capsys):
    talk(chat, "/copy", "hello", "/copy")
    assert (said := capsys.readouterr().err).count("error:") == 2 and "Only a terminal" in said
    chat.out = Console(file=io.StringIO(), force_terminal=True, width=80)
    shown = talk(chat, "/copy")
    assert f"\x1b]52;c;{base64.b64encode(chat.llm.answer.encode()).decode()}\a" in shown


def test_model_puts_another_model_in_its_place(chat, fake_llm, monkeypatch, capsys):
    loaded = []

    def load(name):
        loaded.append(name)
        if name == "broken":
            raise ModelNotFoundError("It is broken.")
        if name == "slow":
            raise KeyboardInterrupt
        return fake_llm()

    monkeypatch.setattr(import_module("paceline.models.load.resolve"), "resolve", lambda name: name)
    chat.switch = switcher(load, "first")
    old = chat.llm
    talk(chat, "hello", "/model second", "and now?")
    assert chat.llm is not old and len(chat.llm.asked[0]) == 3
    talk(chat, "/model broken", "still there?", "/model")
    assert loaded == ["second", "broken", "second"] and len(chat.messages) == 6
    assert "It is broken" in (said := capsys.readouterr().err) and "paceline list" in said
    talk(chat, "/model slow", "still there?")
    assert loaded[-2:] == ["slow", "second"] and len(chat.messages) == 8, "Ctrl-C gives the wait up, not the chat"
    assert "was not waited for" in capsys.readouterr().err


def test_tab_completes_commands_and_what_they_take(tmp_path):
    assert completions("/s") == ["/system ", "/set ", "/save "]
    assert completions("/e") == ["/exit"]
    assert completions("/set top") == ["top_k", "top_p"]
    assert completions("/model qwen3-0") == ["qwen3-0.6b"]
    (tmp_path / "talk.json").touch()
    assert completions(f"/load {tmp_path}/ta") == [f"{tmp_path}/talk.json"]
    assert completions("hello /s") == [] and completions("/set top_p 0") == []


def test_a_block_between_quotes_is_one_message():
    def message(*lines):
        feed = iter(lines)

        def read_line(_prompt):
            for line in feed:
                return line
            raise EOFError

        return read_message(read_line)

    assert message('"""', "one", "", "  two", '"""') == "one\n\n  two"
    assert message('"""one', 'two"""') == "one\ntwo"
    assert message('"""all of it"""') == "all of it"
    assert message('"""', "never ended") == "never ended"


def test_a_piped_block_is_one_message(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('"""\nfirst\nsecond\n"""\n'))
    assert main(["chat"]) == 0
    assert fake_llm.last.asked[0] == [{"role": "user", "content": "first\nsecond"}]


def test_several_lines_that_begin_with_a_slash_are_no_command(chat):
    talk(chat, "/usr/bin/python\n/usr/bin/ls")
    assert chat.messages[0]["content"].startswith("/usr/bin/python")


def test_saved_text_is_readable(chat, tmp_path):
    chat.messages = [{"role": "user", "content": "Grüße"}]
    talk(chat, f"/save {tmp_path}/x.json")
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert "Grüße" in text and json.loads(text)["messages"] == chat.messages
