"""A conversation: streaming, commands, Ctrl-C, and the built-in question when nobody is there."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from paceline.cli.chat import BUILT_IN_QUESTION, interact
from paceline.cli.conversation import Conversation
from paceline.cli.main import main
from paceline.cli.terminal import printable, soft_interrupts
from paceline.request import SamplingParams


@pytest.fixture
def conversation(fake_llm):
    out = Console(file=io.StringIO(), highlight=False, width=200)
    return Conversation(fake_llm(), SamplingParams(max_tokens=None), out)


def talk(conversation, *lines):
    """Feed lines (exceptions are raised as if typed) and return what was shown."""
    feed = iter(lines)

    def read_line(_prompt):
        line = next(feed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    interact(conversation, read_line)
    return conversation.out.file.getvalue()


def test_without_a_terminal_one_question_is_answered(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat"]) == 0
    out = capsys.readouterr().out
    assert BUILT_IN_QUESTION in out
    assert fake_llm.answer in out
    assert "tok/s" in out


def test_piped_lines_are_one_conversation(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Who wrote Hamlet?\n\n  When?\n/exit\nnever asked\n"))
    assert main(["chat"]) == 0
    shown = capsys.readouterr().out
    assert "> Who wrote Hamlet?" in shown and "> When?" in shown and BUILT_IN_QUESTION not in shown
    assert [message["content"] for message in fake_llm.last.asked[-2]] == [
        "Who wrote Hamlet?", fake_llm.answer, "When?"]


def test_a_piped_question_that_fails_is_exit_code_2_and_the_next_is_answered(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a bad one\na good one\n"))
    assert main(["chat"]) == 2
    assert fake_llm.answer in capsys.readouterr().out.split("> a good one")[1]


def test_a_pipe_that_says_nothing_and_does_not_end_is_not_waited_for(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("paceline.cli.chat.PATIENCE_S", 0.01)
    reading, writing = os.pipe()
    with os.fdopen(reading) as silent:
        monkeypatch.setattr("sys.stdin", silent)
        assert main(["chat"]) == 0
        assert BUILT_IN_QUESTION in capsys.readouterr().out
        os.write(writing, b"hello\n")
        os.close(writing)
        assert main(["chat"]) == 0
        assert "> hello" in capsys.readouterr().out


def test_bytes_that_are_no_text_are_explained(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert main(["chat"]) == 2
    assert "not utf-8 text" in capsys.readouterr().err


def test_without_a_terminal_the_answer_is_greedy(fake_llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    main(["chat"])
    _messages, (_prompt, params) = fake_llm.last.asked
    assert params.temperature == 0


def test_an_answer_that_was_cut_says_so(conversation, monkeypatch):
    monkeypatch.setattr(type(conversation.llm), "ending", "length")
    assert "--max-tokens" in talk(conversation, "hello")


def test_a_failed_answer_without_a_terminal_is_exit_code_2(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("paceline.cli.chat.BUILT_IN_QUESTION", "bad")
    assert main(["chat"]) == 2
    assert "is bad" in capsys.readouterr().err


def test_options_reach_the_engine(fake_llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "some-model", "--deterministic", "--temperature", "0.5", "--seed", "3", "--max-tokens", "9",
                 "--system", "Be brief."]) == 0
    messages, (_prompt, params) = fake_llm.last.asked
    assert fake_llm.last.options["deterministic"] is True
    assert (params.temperature, params.seed, params.max_tokens) == (0.5, 3, 9)
    assert messages[0] == {"role": "system", "content": "Be brief."}


def test_the_conversation_is_remembered(conversation):
    talk(conversation, "hello", "and again?")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "user", "assistant"]
    assert conversation.messages[1]["content"] == conversation.llm.answer


def test_commands(conversation):
    shown = talk(conversation, "hello", "/help", "/nonsense", "", "/reset")
    assert "/system TEXT" in shown and "unknown command /nonsense" in shown
    assert conversation.messages == []
    talk(conversation, "/system Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    talk(conversation, "/system")
    assert conversation.messages == []


def test_exit_leaves_before_the_next_line(conversation):
    talk(conversation, "/exit", "never asked")
    assert conversation.llm.asked == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(conversation, monkeypatch):
    monkeypatch.setattr(type(conversation.llm), "interrupt_after", 5)
    shown = talk(conversation, "hello", KeyboardInterrupt(), "/exit")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Paris"}
    assert "stopped" in shown and "Ctrl-D to leave" in shown
    assert conversation.llm.closed == 1


def test_ctrl_c_in_our_own_code_cancels_the_request(conversation, monkeypatch):
    """The interrupt may arrive while we print, not while the engine runs: the request must be cancelled then too."""

    def put(text, style):
        if text == "a":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation, "_put", put)
    talk(conversation, "hello")
    assert conversation.llm.closed == 1
    assert conversation.messages[-1]["content"] == "Pa"


def test_a_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), soft_interrupts() as flag:
        signal.raise_signal(signal.SIGINT)
        assert flag.raised
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failed_request_leaves_the_conversation_as_it_was(conversation, capsys):
    talk(conversation, "hello", "bad one", "/exit")
    assert [m["content"] for m in conversation.messages] == ["hello", conversation.llm.answer]
    assert "is bad" in capsys.readouterr().err


def test_model_text_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\r\nc\td\x9bé") == "a[2Jb\nc\tdé"
