"""A chat template ends: whatever it repeats or makes, with so many steps and so much text. And what templates of real
models do costs a small part of that."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.errors import RequestError
from paceline.models.bounded_templates import BoundedEnvironment, LimitError, Limits, Spent
from paceline.models.chat import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
SMALL = Limits(seconds=20.0, steps=20_000, characters=1 << 16)
TWICE = "{% for i in range(60) %}{% set ns.x = CODE %}{% endfor %}"


def doubled(code: str, start: str = "'ab'", end: str = "{{ ns.x }}") -> str:
    return "{% set ns = namespace(x=" + start + ") %}" + TWICE.replace("CODE", code) + end


HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that takes nothing": "{% for a in range(99999) if range(99999) | list | length < 1 %}{% endfor %}",
    "macros that call themselves twice":
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a loop within itself": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "filters of items": "{{ range(99999) | map('string') | map('length') | sum }}",
    "tests of items": "{{ range(99999) | reject('ge', 0) | list }}",
    "a text times a number": "{{ 'x' * 9999999999 }}", "a number times a text": "{{ 9999999999 * 'x' }}",
    "a list times a number": "{{ [1] * 9999999999 }}", "a tuple times a number": "{{ (1,) * 9999999999 }}",
    "plus": doubled("ns.x + ns.x"), "tilde": doubled("ns.x ~ ns.x"), "lists": doubled("[ns.x, ns.x]"),
    "tuples": doubled("(ns.x, ns.x)"), "objects": doubled("{'a': ns.x, 'b': ns.x}"),
    "dict": doubled("dict(a=ns.x, b=ns.x)"),
    "namespaces": doubled("namespace(a=ns.x, b=ns.x)"), "plus of lists": doubled("ns.x + ns.x", "[1]"),
    "replace": doubled("ns.x.replace('', ns.x)"), "join": doubled("ns.x.join([ns.x, ns.x])"),
    "the filter join": doubled("[ns.x, ns.x] | join(ns.x)"), "the filter replace": doubled("ns.x | replace('a', ns.x)"),
    "format": doubled("'{0}{0}'.format(ns.x)"), "percent": doubled("'%s%s' % (ns.x, ns.x)"),
    "the filter format": doubled("'%s%s' | format(ns.x, ns.x)"), "fromkeys": doubled("{}.fromkeys(range(9), ns.x)"),
    "batch": doubled("[1] | batch(3, ns.x) | list", "[1]"), "slices": doubled("[1] | slice(3, ns.x) | list", "[1]"),
    "blocks": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
              "{% set ns.x = y %}{% endfor %}",
    "levels":
        "{% set ns = namespace(x=()) %}{% for i in range(9999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "attributes": "{% set ns = namespace() %}{% set x = 'x' * 40000 %}{% set ns.a = x %}{% set ns.b = x %}{{ ns }}",
    "attributes as text": "{% set ns = namespace() %}{% set x = 'x' * 40000 %}{% set ns.a = x %}{% set ns.b = x %}"
                          "{{ ns | string | length }}",
    "powers": "{{ 9 ** 999999 }}", "products": doubled("ns.x * ns.x", "99", "{{ ns.x > 1 }}"),
    "center": "{{ 'x'.center(999999999) }}", "the filter center": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}", "zfill": "{{ 'x'.zfill(999999999) }}",
    "bytes": "{{ (5).to_bytes(999999999, 'big') }}",
    "tabs": "{{ ('\t' * 99).expandtabs(9999999) }}", "indent": "{{ ('x\n' * 99) | indent(9999999) }}",
    "widths": "{{ '%999999999d' % 1 }}", "widths by value": "{{ '%*d' % (999999999, 1) }}",
    "widths of format": "{{ '{:>999999999}'.format(1) }}", "nested widths": "{{ '{:{}}'.format(1, 999999999) }}",
    "digits": "{{ 1.5 | round(999999999, 'ceil') }}", "spaces of JSON": "{{ [1] | tojson(indent=999999999) }}",
    "sums of lists": "{{ ([[1] * 99] * 600) | sum(start=[]) }}",
    "text": "{% for i in range(9999) %}0123456789{% endfor %}",
    "text in a macro":
        "{% macro m() %}{% for i in range(9999) %}0123456789{% endfor %}{% endmacro %}{{ m() | length }}",
    "times": "{{ strftime_now('%Y' * 999) }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_ends(source: str) -> None:
    with pytest.raises(RequestError, match=r"come to an end|broken") as refused:
        ChatTemplate(source, limits=SMALL).render(HI)
    assert isinstance(refused.value.__cause__, LimitError) and refused.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ lipsum(n=99999) }}", "{{ 'x' | pprint }}", "{{ 'x' | urlize }}"])
def test_what_pages_need_is_not_there(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source).render(HI)


def test_nested_deep_or_long_sources_are_refused() -> None:
    for source in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * (1 << 21),
                   "{% for a in b %}" * 30 + "{% endfor %}" * 30):
        with pytest.raises(RequestError, match="broken"):
            ChatTemplate(source).render(HI)


def test_what_it_says_is_cut() -> None:
    with pytest.raises(RequestError) as refused:
        ChatTemplate("{{ raise_exception('no ' * 9999) }}").render(HI)
    assert len(str(refused.value)) < 1000


def test_computing_is_measured_by_the_threads_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes long is noticed by the next ones; a machine that is busy with others' is not."""
    now = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: now)
    spent = Spent(Limits(seconds=5.0))
    for _ in range(100):
        assert spent.step()
    now = 5.1
    with pytest.raises(LimitError, match="5 seconds"):
        for _ in range(16):
            spent.step()


def test_each_rendering_has_limits_of_its_own_in_any_thread() -> None:
    template = ChatTemplate("{% for i in range(n) %}.{% endfor %}", limits=Limits(steps=1000))
    found: list[str] = []

    def render() -> None:
        found.extend(template.render(HI, n=900) for _ in range(5))

    threads = [threading.Thread(target=render) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["." * 900] * 20
    with pytest.raises(RequestError, match="1,000 steps"):
        template.render(HI, n=1100)
    assert template.render(HI, n=3) == "..."


@pytest.mark.parametrize(("source", "expected"), [
    ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"), ("{{ 'ab'.join(['1', '2']) }}", "1ab2"),
    ("{{ '%05.1f|%s' % (2.25, 'x') }}", "002.2|x"), ("{{ '{:>4}|{a}'.format(7, a=1) }}", "   7|1"),
    ("{{ [1, 2, 3] | batch(2, 0) | list }}", "[[1, 2], [3, 0]]"), ("{{ 2 ** 10 }}", "1024"), ("{{ 'ab' * 2 }}", "abab"),
    ("{{ [[1], [2]] | sum(start=[]) }}", "[1, 2]"), ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
    ("{{ 'a\nb' | indent(2) }}", "a\n  b"), ("{{ 2.567 | round(1) }}", "2.6"), ("{{ 'x' | center(3) }}", " x "),
    ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ loop.last }}{% endfor %}", "1True"),
    ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "x1"),
    ("{% macro m(a, b=2) %}{{ a + b }}{% endmacro %}{{ m(1) }}{{ m(1, b=3) }}", "34"),
    ("{% set ns = namespace(l=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l }}",
     "[0, 1, 2]"),
    ("{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content }}", "hi"),
    ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"), ("{{ 'a,b'.split(',')[-1] }}", "b"),
])
def test_what_templates_do_is_as_it_was(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(HI) == expected


def test_a_long_conversation_takes_a_small_part_of_the_limits() -> None:
    source = ("{% set ns = namespace(text='') %}{% for message in messages %}"
              "{% set content = message['content'] | trim %}"
              "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no') }}{% endif %}"
              "{{ '<|' + message.role + '|>' + content ~ '\n' }}{% set ns.text = ns.text + content %}{% endfor %}")
    messages = [{"role": role, "content": "word " * 200} for role in ("user", "assistant")] * 200
    assert len(ChatTemplate(source, limits=Limits(steps=10_000)).render(messages)) > 400 * 1000


def test_every_operator_and_filter_is_bounded() -> None:
    """What a new version of the library brings along counts steps like the rest."""
    environment = BoundedEnvironment()
    environment.bound()
    assert environment.intercepted_binops == frozenset(environment.binop_table)
    with environment.spending(Limits(steps=1)):
        environment.filters["upper"]("a")
        with pytest.raises(LimitError):
            environment.filters["lower"]("a")
    with environment.spending(Limits(steps=0)):
        for name, found in {**environment.filters, **environment.tests}.items():
            if not name.startswith("("):  # its own
                with pytest.raises(LimitError):
                    found("a")
