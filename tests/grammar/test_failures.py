"""A structure that cannot be used fails its own request, with the field and the reason; nobody else notices."""

from __future__ import annotations

import builtins
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, trainers

from grammar.structured import PROMPT, compiled, structured_llm, tokenizer
from paceline import SamplingParams
from paceline.engine.structures import Structures
from paceline.errors import GrammarError, QueueFullError, RequestError
from paceline.grammar import structure
from paceline.grammar.compiler import SPARE, THREADS, WAITING, GrammarCompiler, wait_for
from paceline.grammar.library import Library
from paceline.grammar.sequence import SequenceGrammar
from paceline.grammar.structure import Structure
from paceline.grammar.vocabulary import Vocabulary
from paceline.models.tokenizer import Tokenizer

PLAIN = SamplingParams(max_tokens=6, seed=1)
BYTES = Vocabulary([bytes([n]) for n in range(256)], lambda text: list(text.encode()))


@pytest.mark.parametrize("wish", [
    {"regex": 5}, {"regex": ""}, {"grammar": ""}, {"grammar": ["a"]}, {"choice": []}, {"choice": ["a", ""]},
    {"choice": ["a", 3]}, {"json_schema": 4}, {"json_schema": ["a"]}])
def test_wrong_types_are_told_at_once(wish: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wish)
    assert caught.value.param == next(iter(wish)) and next(iter(wish)) in str(caught.value)


def test_one_structure_a_request() -> None:
    with pytest.raises(RequestError, match="json_schema and regex"):
        SamplingParams(json_schema={}, regex="a")


BAD = [
    ("json_schema", "{", "not JSON"), ("json_schema", "[1]", "list"), ("json_schema", False, "no text matches"),
    ("json_schema", {"type": "strin"}, "strin"), ("json_schema", {"a": float("nan")}, "not JSON"),
    ("json_schema", {"a": {1, 2}}, "set"), ("json_schema", {"enum": []}, "Unsatisfiable"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ("json_schema", {"allOf": [{"type": "integer"}, {"type": "string"}]}, "Unsatisfiable"),
    ("json_schema", {"$ref": "#/nope"}, "nope"), ("json_schema", {"$ref": "#"}, "no text has an end"),
    ("json_schema", {"not": {"format": "uri"}}, "not"), ("json_schema", {"contains": {"type": "string"}}, "contains"),
    ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "regex"),
    ("json_schema", json.loads('{"items":' * 200 + "{}" + "}" * 200), "nested too deeply"),
    ("regex", "(", "regex"), ("regex", "(a)\\1", "regex"), ("regex", "\\bfoo", "lookaround"),
    ("regex", "[^\\s\\S]", "no text matches"), ("regex", "\ud800", "surrogate"), ("choice", ["\ud800"], "surrogate"),
    ("grammar", "start: missing", "missing"), ("grammar", "start: (", "cannot be used"),
    ("grammar", 'start: start "a"', "no text matches"), ("grammar", "root ::= [", "cannot be used"),
    ("grammar", "nothing here", "cannot be used"),
]


@pytest.mark.parametrize(("field", "value", "reason"), BAD)
def test_bad_structures_fail_alone(field: str, value: Any, reason: str) -> None:
    llm = structured_llm()
    bad, good = llm.generate([PROMPT] * 2, [SamplingParams(**{field: value}), PLAIN], speculation="auto")
    assert isinstance(bad.error, GrammarError) and bad.error.param == field
    assert field in str(bad.error) and reason in str(bad.error)
    assert bad.outputs[0].finish_reason == "error" and not bad.outputs[0].token_ids
    assert good.error is None and len(good.outputs[0].token_ids) == 6
    assert not llm.engine.has_work
    llm.engine.cache.check([])


def test_what_is_remembered_of_a_bad_structure_keeps_nobody_who_asked() -> None:
    """An error keeps the frames that it passed, and with them all that those held."""
    class Held:
        pass

    def ask() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(GrammarError) as caught:
            compiler.compile(Structure("regex", "((")).result()
        assert caught.value.param == "regex"
        return weakref.ref(held)

    compiler = GrammarCompiler(lambda: BYTES)
    wait_for([compiler.compile(Structure("regex", "(("))], 60)
    asked = [ask() for _ in range(3)]
    gc.collect()
    assert [one() for one in asked] == [None] * 3


def test_a_structure_can_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "LONGEST", 100)
    with pytest.raises(GrammarError, match="100 are the limit"):
        structured_llm().generate([PROMPT], SamplingParams(choice=["x" * 101]))


def test_a_structure_that_grows_too_complex_fails_before_anything_is_said() -> None:
    """Two thousand optional properties: too many ways to go on after the brace."""
    schema = {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(2500)}}
    llm = structured_llm()
    bad, good = llm.generate([PROMPT] * 2, [SamplingParams(json_schema=schema, max_tokens=50), PLAIN])
    assert isinstance(bad.error, GrammarError) and bad.error.param == "json_schema"
    assert "became" not in str(bad.error) and not bad.outputs[0].token_ids
    assert good.error is None
    llm.engine.cache.check([])


def test_without_the_package_the_request_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refusing)
    bad, good = structured_llm().generate([PROMPT] * 2, [SamplingParams(regex="a"), PLAIN])
    assert isinstance(bad.error, GrammarError) and "pip install llguidance" in str(bad.error)
    assert good.error is None


def test_a_structure_that_is_not_to_blame_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, problems = Library.compile, [MemoryError("no room")]

    def short(self: Library, wanted: Structure) -> Any:
        if problems:
            raise problems.pop()
        return real(self, wanted)

    monkeypatch.setattr(Library, "compile", short)
    llm = structured_llm()
    params = SamplingParams(choice=["yes"])
    bad = llm.generate([PROMPT, PROMPT], [params, PLAIN])[0]
    assert isinstance(bad.error, GrammarError) and "no room" in str(bad.error)
    assert llm.generate([PROMPT], params)[0].outputs[0].text == "yes"


# ------------------------------------------------------------------------------------------------ slow ones

class Gate:
    """Compilation that waits to be let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.compiled: list[str] = []
        original = Library.compile

        def slow(library: Library, wanted: Structure) -> Any:
            if wanted.text.startswith("slow"):
                self.open.wait(60)
            self.compiled.append(wanted.text)
            return original(library, wanted)

        monkeypatch.setattr(Library, "compile", slow)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open.set()


def test_others_run_on_while_a_structure_is_compiled(gate: Gate) -> None:
    llm = structured_llm()
    engine = llm.engine
    slow = engine.add(PROMPT, SamplingParams(regex="slow[ab]", seed=1))
    other = engine.add(PROMPT, PLAIN)
    quick = engine.add(PROMPT, SamplingParams(regex="quick", seed=1))
    while engine.record(other).open or engine.record(quick).open:
        engine.step()
    assert engine.record(slow).open and engine.scheduler.queue_length == 1 and engine.has_work
    gate.open.set()
    while engine.record(slow).open:
        engine.step()
    assert engine.take(slow).snapshot().outputs[0].text in ("slowa", "slowb")
    assert engine.take(quick).snapshot().outputs[0].text == "quick"
    assert not engine.has_work
    engine.cache.check([])


def test_a_time_limit_fails_that_request_alone(gate: Gate) -> None:
    llm = structured_llm()
    engine = llm.engine
    now = [0.0]
    engine.structures._compiler = GrammarCompiler(engine.structures._vocabulary, seconds=5.0, clock=lambda: now[0])
    slow = engine.add(PROMPT, SamplingParams(regex="slow", n=2))
    late = engine.add(PROMPT, SamplingParams(regex="quick", max_tokens=20))
    while engine.record(late).open:
        engine.step()
    while engine.structures._waiting[slow][0]._begun is None:
        engine.step()
    now[0] = 5.5
    engine.step()
    out = engine.take(slow).snapshot()
    assert isinstance(out.error, GrammarError) and "within 5 seconds" in str(out.error) and out.error.param == "regex"
    assert [one.finish_reason for one in out.outputs] == ["error", "error"]
    assert engine.take(late).snapshot().outputs[0].text == "quick" and not engine.has_work
    gate.open.set()
    compilation = engine.structures.compiler.compile(Structure("regex", "slow"))
    compilation.future.result(60)
    assert engine.structures.compiler.compile(Structure("regex", "slow")) is compilation and compilation.over


def test_stuck_structures_do_not_block_those_behind_them(gate: Gate) -> None:
    now = [0.0]
    compiler = GrammarCompiler(lambda: BYTES, seconds=5.0, clock=lambda: now[0])
    stuck = [compiler.compile(Structure("regex", f"slow{place}")) for place in range(THREADS)]
    behind = compiler.compile(Structure("regex", "quick"))
    while any(one._begun is None for one in stuck):
        time.sleep(0.001)
    assert not behind.over
    now[0] = 5.5
    assert all(one.over for one in stuck)
    behind.over  # noqa: B018 (asking gives it its turn)
    assert behind.future.result(60) is behind.result()
    gate.open.set()


def test_who_waits_too_long_for_a_thread_is_told_and_may_try_again(gate: Gate) -> None:
    now = [0.0]
    compiler = GrammarCompiler(lambda: BYTES, seconds=5.0, clock=lambda: now[0])
    for place in range(THREADS + SPARE):
        now[0] += 5.5  # those before are late
        task = compiler.compile(Structure("regex", f"slow{place}"), f"tenant {place % 2}")
        while task._begun is None:
            time.sleep(0.001)
    behind = compiler.compile(Structure("regex", "quick"))
    assert not behind.over
    now[0] += WAITING + 1
    assert behind.over
    with pytest.raises(GrammarError, match="kept it waiting"):
        behind.result()
    assert compiler.compile(Structure("regex", "quick")) is behind and not behind.over
    gate.open.set()
    assert behind.future.result(60) is behind.result()


def test_a_request_that_waited_too_long_for_a_thread_ends_alone(gate: Gate) -> None:
    """The last who waits for a structure takes it out of the queue when it gives up."""
    engine = structured_llm().engine
    compiler, now = engine.structures.compiler, [0.0]
    compiler._clock, compiler._seconds = lambda: now[0], 5.0
    for place in range(THREADS + SPARE):
        now[0] += 5.5  # those before are late
        task = compiler.compile(Structure("regex", f"slow{place}"), f"tenant {place % 2}")
        while task._begun is None:
            time.sleep(0.001)
    waits = engine.add(PROMPT, SamplingParams(regex="quick"))
    engine.step()
    now[0] += WAITING + 1
    assert [record.request.id for record in engine.step()] == [waits]
    error = engine.take(waits).snapshot().error
    assert isinstance(error, GrammarError) and "kept it waiting" in str(error)
    assert not engine.has_work


def test_a_held_request_can_be_cancelled_and_expire(gate: Gate) -> None:
    llm = structured_llm(max_queue=2)
    engine = llm.engine
    now = [0.0]
    engine.clock = engine.scheduler.clock = lambda: now[0]
    first = engine.add(PROMPT, SamplingParams(regex="slow1"))
    second = engine.add(PROMPT, SamplingParams(regex="slow2", timeout_s=3.0))
    with pytest.raises(QueueFullError):
        engine.add(PROMPT, PLAIN)
    engine.step()
    engine.cancel(first)
    assert engine.take(first).snapshot().outputs[0].finish_reason == "cancelled"
    now[0] = 4.0
    assert [record.request.id for record in engine.step()] == [second]
    assert engine.take(second).snapshot().outputs[0].finish_reason == "timeout"
    assert not engine.has_work and not engine.structures._waiting
    gate.open.set()
    assert structured_llm().generate([PROMPT], PLAIN)[0].error is None


def test_a_structure_is_compiled_once_and_old_ones_are_forgotten(gate: Gate) -> None:
    vocabulary = Vocabulary([bytes([n]) for n in range(256)], lambda text: list(text.encode()))
    compiler = GrammarCompiler(lambda: vocabulary, kept=3)
    wanted = [Structure("regex", text) for text in ("a", "b", "a", "c", "d", "a", "b")]
    for one in wanted:
        compiler.compile(one).future.result(60)
    assert gate.compiled == ["a", "b", "c", "d", "b"]
    compiler.close()


# ------------------------------------------------------------------------------------------------ other tokenizers

def sentencepiece() -> Tokenizer:
    """Puts a space before every text, has tokens for single bytes, and drops the first space of a text."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(['{"name": "fox", "age": 1} the quick brown fox'] * 20, trainers.BpeTrainer(
        vocab_size=500, special_tokens=names, show_progress=False))
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [one for one in raw["added_tokens"] if not one["content"].startswith("<0x")]
    return Tokenizer(Backend.from_str(json.dumps(raw)), eos_ids=[2])


@pytest.mark.parametrize("text", ["name: fox", '{"name": "日本", "age": 1}', "the quick </s> fox", "\x00\n"])
def test_spelling_is_exact_in_any_tokenizer(text: str) -> None:
    for own in (sentencepiece(), tokenizer()):
        structures = Structures(own, own.vocab_size + 20, own.eos_ids, lambda: 0.0)
        ids = structures._vocabulary().spell(text)
        assert b"".join(own.token_bytes(one) or b"?" for one in ids) == text.encode()
        grammar = structures.compiler.compile(structure_named(choice=[text])).future.result(60)
        sequence, output = SequenceGrammar(grammar, own.vocab_size + 20, own.eos_ids), list[int]()
        while not sequence.closed(output):
            mask = sequence.mask(())
            assert mask is not None and mask.any()
            output.append(int(mask.argmax()))
            sequence.append(output[-1:])
        stream = own.detokenizer()
        assert stream.extend(output) + stream.flush() == text


def structure_named(**wish: Any) -> Structure:
    found = structure.structure_of(SamplingParams(**wish))
    assert found is not None
    return found


def test_tokens_without_a_text_of_their_own_are_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(GrammarError, match="text of each token"):
        Structures(Tokenizer(backend), 2, frozenset(), lambda: 0.0).wanted(SamplingParams(regex="a"))


def test_whitespace_is_bounded_and_can_be_turned_off() -> None:
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2}
    compact = schema | {"x-guidance": {"whitespace_flexible": False}}
    for text, flexible, strict in [("[null,null]", True, True), ("[null, null]", True, False),
                                   ("[\n  null,\n  null\n]", True, False), ("[null,   null]", False, False)]:
        for wanted, expected in ((schema, flexible), (compact, strict)):
            sequence = SequenceGrammar(compiled(json_schema=wanted), 700, [])
            ids = tokenizer().encode(text, add_special=False)
            sequence.append(ids)
            assert sequence.closed(ids) is expected, (text, expected)
