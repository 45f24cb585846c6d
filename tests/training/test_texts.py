"""Prompts, jobs and shards: what is read is checked, what was broken off goes on, what is on disk is whole."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.training.generate import AnswerMaker, Order
from paceline.training.jobs import Jobs, encoder, job_seed, make_prompts
from paceline.training.prompts import read_prompts
from paceline.training.shards import Shards, Text
from paceline.training.vocabulary import choose, coverage, spare_token


def test_prompts_of_all_kinds_of_files(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in ("one", "t\u2028wo", "one"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.txt").write_text("first line\nsecond line\n\n\nanother\n")
    assert read_prompts([tmp_path / "a.jsonl.gz", tmp_path / "b.txt"]) == [
        "one", "t\u2028wo", "first line\nsecond line", "another"]


CONVERSATION = [{"role": "user", "content": "fox river"}, {"role": "assistant", "content": "the fox jumps."},
                {"role": "user", "content": "and then?"}]


def test_conversations_are_prompts(tmp_path: Path, target_folder: Path) -> None:
    alone = [{"role": "user", "content": "fox river"}]
    rows: list[dict[str, object]] = [{"messages": CONVERSATION}, {"messages": alone}, {"prompt": "fox river"},
                                     {"messages": CONVERSATION, "kind": "again"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talk, prompt = read_prompts([tmp_path / "a.jsonl"])
    assert prompt == "fox river"  # a single turn is a prompt like any other
    llm = LLM(str(target_folder), device="cpu", kernels="eager", max_model_len=96)
    encode = encoder(llm)
    assert encode(talk) == llm.render(CONVERSATION) != encode(prompt) == llm.render(alone)
    assert llm.engine.chat is not None
    llm.engine.chat.source = None
    assert encoder(llm)(talk) == llm.engine.tokenizer.encode("fox river\n\nthe fox jumps.\n\nand then?")


@pytest.mark.parametrize(("name", "content", "says"), [
    ("a.jsonl", b'{"messages": "x"}\n', 'line 1: "messages" is a list of objects'),
    ("a.jsonl", b'{"messages": ["x"]}\n', 'line 1: "messages" is a list of objects'),
    ("a.jsonl", b'{"messages": []}\n', 'must end with a user'),
    ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}\n', 'must end with a user'),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}, {"role": "cat", "content": "y"}]}\n', "message 2"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": " "}]}\n', 'message 1 needs a "role"'),
    ("a.jsonl", b'{"prompt": "x"}\nnot json\n', "line 2: not JSON"),
    ("a.jsonl", b'{"prompt": "x"}\n\n{"text": "y"}\n', 'line 3: there is no "prompt"'),
    ("a.jsonl", b'{"prompt": 3}\n', "line 1"),
    ("a.jsonl", b'[1]\n', "line 1"),
    ("a.jsonl", b'{"prompt": "x"}\n\xff\xfe\n', "line 2: not UTF-8"),
    ("a.jsonl", b"", "holds no prompts"),
    ("a.txt", b" \n\n", "holds no prompts"),
    ("a.jsonl.gz", b"plainly not gzip", "no whole .gz file"),
])
def test_bad_files_say_where(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        read_prompts([tmp_path / name])
    with pytest.raises(ConfigError, match="Cannot read"):
        read_prompts([tmp_path / "missing.txt"])


def test_a_cut_off_gz_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt": "x"}\n' * 100)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ConfigError, match=r"no whole \.gz"):
        read_prompts([tmp_path / "a.jsonl.gz"])


def some_jobs(count: int = 5) -> Jobs:
    return Jobs([f"p{place}" * (place + 1) for place in range(count)], lambda text: list(text.encode()), 3, (0.0, 1.0),
                6)


def test_a_job_follows_from_its_number() -> None:
    first, again = some_jobs(), some_jobs()
    jobs = [first.job(index) for index in range(20)]
    assert [again.job(index) for index in (19, 7, 0)] == [jobs[19], jobs[7], jobs[0]]
    kept = [job for job in jobs if job is not None]
    assert len(kept) == 12 and all(len(job.prompt) <= 6 for job in kept)  # two of five are too long
    assert len({job.seed for job in kept}) == len(kept)
    by_prompt = {tuple(job.prompt): {other.temperature for other in kept if other.prompt == job.prompt} for job in kept}
    assert all(found == {0.0, 1.0} for found in by_prompt.values())
    assert job_seed(3, 4) != job_seed(34, 0)


@pytest.mark.parametrize("temperatures", [(0.0, 0.7, 1.0), (1.0, 0.0)])
def test_a_greedy_answer_comes_once_a_prompt(temperatures: tuple[float, ...]) -> None:
    jobs = Jobs(["a", "b", "c"], lambda text: list(text.encode()), 3, temperatures, 6)
    by_prompt: dict[int, list[float]] = {}
    for index in range(24):
        job = jobs.job(index)
        assert job is not None
        by_prompt.setdefault(job.prompt[0], []).append(job.temperature)
    for found in by_prompt.values():
        assert len(found) == 8 and found.count(0.0) == 1
        assert sorted(found[:len(temperatures)]) == sorted(temperatures) and set(found) == set(temperatures)
    greedy = Jobs(["a"], lambda text: [1], 3, (0.0,), 6)
    assert [greedy._temperature(sample, 0) for sample in range(3)] == [0.0] * 3


def texts(count: int, first: int = 0) -> list[Text]:
    return [Text(index, np.arange(index, index + 9, dtype=np.int32), 4) for index in range(first, first + count)]


def as_lists(found: object) -> list[tuple[int, list[int], int]]:
    return [(text.index, text.tokens.tolist(), text.prompt) for text in found]  # type: ignore[attr-defined]


def test_shards_are_opened_again(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "s", {"seed": 1}, 300)
    shards.add(texts(3), [3])
    shards.add(texts(2, 4), [])
    again = Shards(tmp_path / "s", {"seed": 1}, 300)
    assert again.done == {0, 1, 2, 3, 4, 5}
    assert as_lists(again.read()) == as_lists(texts(3) + texts(2, 4))
    with np.load(tmp_path / "s" / "shard-00000.npz") as data:
        assert data["tokens"].dtype == np.uint16
    with pytest.raises(ConfigError, match="other settings \\(seed\\)"):
        Shards(tmp_path / "s", {"seed": 2}, 300)


def test_a_shard_that_was_broken_off_never_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(tmp_path / "s", {}, 1 << 17)
    shards.add(texts(2), [])

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(ConfigError, match="No space left on device"):
            shards.add(texts(2, 2), [])
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["manifest.json", "shard-00000.npz"]
    again = Shards(tmp_path / "s", {}, 1 << 17)
    assert again.done == {0, 1}
    again.add(texts(2, 2), [])
    assert Shards(tmp_path / "s", {}, 1 << 17).done == {0, 1, 2, 3}


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "s", {}, 300)
    shards.add(texts(2), [])
    file = tmp_path / "s" / "shard-00000.npz"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="cut short"):
        Shards(tmp_path / "s", {}, 300)
    (tmp_path / "s" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Shards(tmp_path / "s", {}, 300)


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return LLM(str(target_folder), device="cpu", kernels="reference", max_model_len=96, max_num_seqs=8)


def test_answers_go_on_where_they_were_broken_off(llm: LLM, tmp_path: Path) -> None:
    jobs = Jobs(["fox river", "dog sea road", "cat hill wood", "owl", "hen road hill sea"] * 2, encoder(llm), 0,
                (0.0, 1.0), 64)

    def made(folder: Path, turns: int) -> list[tuple[int, list[int], int]]:
        for _ in range(turns):
            order = Order(jobs, Shards(folder, {}, 700), 0, 10)
            maker = AnswerMaker(llm, [order], 24)
            steps = iter(range(30))
            maker.run(lambda steps=steps: turns > 1 and next(steps, None) is None)
            maker.close()
        return sorted(as_lists(Shards(folder, {}, 700).read()))

    at_once, in_turns = made(tmp_path / "a", 1), made(tmp_path / "b", 6)
    assert len(at_once) == 10 and in_turns == at_once
    assert not llm.engine._records


def test_the_target_makes_prompts(llm: LLM) -> None:
    found = make_prompts(llm, 6, 5, 40)
    assert found and found == make_prompts(llm, 6, 5, 40) and all(text.strip() == text for text in found)


def test_the_draft_vocabulary_is_what_comes_most() -> None:
    some = [Text(0, np.array([9, 9, 9, 5, 5, 5, 2, 2, 7], np.int32), 3)]
    ids = choose(some, 12, 3)
    assert ids.tolist() == [2, 5, 7]  # 9 comes most, but in the prompt
    assert choose(some, 12, 4).tolist() == [2, 5, 7, 9]
    assert coverage(some, 12, np.array([5])) == pytest.approx(0.5)
    assert spare_token(some, 12, [1, 3, 9], frozenset({3})) == 1
    assert spare_token(some, 12, [9], frozenset({11})) == 10
