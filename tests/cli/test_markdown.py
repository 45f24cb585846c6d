"""Markdown on a terminal: what is shown, wrapped, and independent of the pieces in which it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.markdown import AsItComes, MarkdownWriter


def shown(pieces, width=20):
    """Characters with their styles."""
    out = []
    writer = MarkdownWriter(lambda text, style: out.extend((char, style) for char in text), lambda: width)
    for piece in pieces:
        writer.write(piece)
    writer.end()
    return out


def text(source, width=20):
    return "".join(char for char, _ in shown([source], width))


def styled(source, style):
    return "".join(char for char, own in shown([source]) if own == style)


def test_lines_break_between_words():
    assert text("the quick brown fox jumps over it") == "the quick brown fox\njumps over it\n"
    assert text("x" * 45) == "x" * 20 + "\n" + "x" * 20 + "\n" + "x" * 5 + "\n"
    assert text("日本語" * 5) == "日本語日本語日本語日\n本語日本語\n"


def test_further_rows_of_an_item_are_indented():
    assert text("- the quick brown fox jumps") == "• the quick brown\n  fox jumps\n"
    assert text("12. the quick brown fox") == "12. the quick brown\n    fox\n"
    assert text("  * inner") == "  • inner\n"
    assert text("> the quick brown fox jumps") == "│ the quick brown\n│ fox jumps\n"


def test_marks_become_styles():
    source = "# Title\nsome **bold words** and `a * b`\n"
    assert text(source, 80) == "Title\nsome bold words and a * b\n"
    assert styled(source, "bold underline") == "Title"
    assert styled(source, "bold") == "bold words"
    assert styled(source, "cyan") == "a * b"


def test_code_is_left_as_it_is():
    source = "```python\ndef f(**more):\n    # no heading, and far too long to fit in here\n```\nafter"
    assert text(source) == "  def f(**more):\n      # no heading, and far too long to fit in here\nafter\n"
    assert "**more" in styled(source, "cyan")
    assert text("~~~\n```\n~~~") == "  ```\n"


@pytest.mark.parametrize("source", ["2 ** 3", "a #hash", "1.5 and 2.", "-5", "#no heading", "*args", "| a | b |",
                                    "a\n\nb", "x - y"])
def test_what_is_no_mark_is_text(source):
    assert text(source) == source + "\n"


def test_a_style_ends_with_its_line():
    assert styled("**never closed\nnext", "bold") == "never closed"
    assert text("```") == "" and text("") == ""


PIECES = st.lists(st.sampled_from(["#", " ", "\n", "*", "**", "`", "```", "- ", "1.", "word", "日本", "> ", "|",
                                   "~~~", "\t", "longer words"]), max_size=30)


@given(PIECES, st.data())
def test_pieces_do_not_matter(parts, data):
    source = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(source)), max_size=8)))
    pieces = [source[a:b] for a, b in zip([0, *cuts], [*cuts, len(source)])]
    assert shown(pieces) == shown([source])


def test_steering_is_dropped_in_both_ways():
    assert text("a\x1b[2Jb") == "a[2Jb\n"
    out = []
    plain = AsItComes(lambda text, style: out.append(text))
    plain.write("**a**\x1b")
    plain.end()
    assert "".join(out) == "**a**\n"
