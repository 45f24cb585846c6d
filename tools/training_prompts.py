"""Prompts to train drafters on, of all kinds that people ask: instructions as they are, and made of them and of plain
texts: follow-ups in conversations, sentences to translate, texts to summarise or to answer from, questions about facts.
Collections of instructions have few of these, and a head that has never read one drafts badly behind it.

    python tools/training_prompts.py --prompts prompts.jsonl.gz --books pride.txt.gz war.txt.gz \\
        --german german.txt.gz --french french.txt.gz --passages english.txt.gz passages.jsonl.gz \\
        --wordnet data.noun.gz --out mixed.jsonl.gz

The same files and --seed give the same prompts. Lines of --prompts have "prompt" and, where it is known, "response":
what was answered there becomes the passage that holds an answer, or an earlier turn. Nothing of it is learned from:
heads learn from the target's own answers alone. --passages are .txt files with a text a line (tools/package_texts.py)
or .jsonl of texts that the target wrote (tools/written_passages.py). A kind whose texts are not given is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import prompt_kinds as kinds
from paceline.measure.perplexity import read_text
from prompt_kinds import SENTENCE_END, Passage, Row, excerpt
from prompt_topics import Topics, question, topics
from tiny_family import books

SHARES = {"instruction": 0.28, "conversation": 0.11, "translate": 0.15, "summarise": 0.18, "rewrite": 0.02,
          "answer": 0.17, "fact": 0.09}
"""Of all prompts."""
GERMAN, FRENCH = 0.7, 0.1
"""Of translations: from these into English; the rest from English into something."""
WRITTEN = 0.7
"""Of English texts: those that the target wrote, where there are any; of the rest as many from books as others."""
NEIGHBOURS = 0.25
"""Of summaries: of several passages that follow each other."""
NAMED = 0.7
"""Of questions to be answered from passages: about what a passage is known to tell; the rest are of the collections."""
PASSAGES = (2, 6)
ALIKE = 0.6
"""Of the passages beside the one that answers: about something of the same kind."""
LONGER = 0.15
"""Of conversations: with two earlier exchanges."""
LONGEST = 3800
"""Characters of all passages of a prompt together: about a thousand tokens."""
SHORTEST = 300
"""Characters of a text that is worth reading for an answer."""
EXCHANGE = 1800
"""Characters of an earlier turn."""


@dataclass(frozen=True)
class Sources:
    rows: list[dict[str, str]]
    """Prompts with their "source" and "response", where they are known."""
    books: list[str]
    foreign: dict[str, list[str]]
    """By language: one to three sentences that follow each other."""
    passages: list[Passage]
    written: list[Passage]
    """By the target."""
    topics: Topics | None


WORD = re.compile(r"([^:.\d]{2,40}): [A-Z]")
"""That a dictionary's entry begins with."""
SUBJECT = re.compile(r"((?:The )?[A-Z][a-z]+(?: [A-Z][a-z]+)*) (?:is|are|was|were) (?:a|an|the|one|inhabited) ")
"""Of a text that begins by saying what it is about."""


def read_passages(paths: list[Path]) -> list[Passage]:
    found = []
    for path in paths:
        for line in lines([path]):
            if ".jsonl" in path.suffixes:
                found.append(Passage(**json.loads(line)))
            else:
                word, subject = WORD.match(line), SUBJECT.match(line)
                kind, topic = ("idea", word[1]) if word else ("", subject[1]) if subject else ("", "")
                found.append(Passage(line, kind, topic))
    return found


def pieces(luck: random.Random, paragraphs: list[str]) -> list[str]:
    """Each sentence once: alone where it is long enough, or with what follows it, up to 40 words."""
    found = []
    for paragraph in paragraphs:
        piece: list[str] = []
        for sentence in SENTENCE_END.split(paragraph):
            words = sum(len(one.split()) for one in [*piece, sentence])
            if piece and (words > 40 or luck.random() < 0.6) and len(" ".join(piece).split()) >= 8:
                found.append(" ".join(piece))
                piece = []
            piece.append(sentence)
        found.append(" ".join(piece))
    return [piece for piece in dict.fromkeys(found) if 7 <= len(piece.split()) <= 60]


def lines(paths: list[Path]) -> list[str]:
    return [line for path in paths for line in read_text(path).split("\n") if line.strip()]


class Maker:
    """Draws prompts of a kind. None: there is nothing to make it of."""

    def __init__(self, luck: random.Random, sources: Sources) -> None:
        self.luck, self.sources = luck, sources
        answered = [row for row in sources.rows if 60 <= len(row.get("response") or "") <= EXCHANGE]
        self.asked = [(row["prompt"], row["response"]) for row in answered
                      if len(row["prompt"]) <= 200 and row["prompt"].endswith("?") and "####" not in row["response"]]
        # Nobody goes on behind a choice of options, and few behind an answer of some words.
        written = [{"prompt": one.prompt, "response": one.text, "source": "written"} for one in sources.written]
        self.exchanges = by_source([row for row in [*answered, *written]
                                    if len(row["prompt"]) <= EXCHANGE and len(row["response"]) >= 120
                                    and "Options:" not in row["prompt"]])
        self.long = [one for one in sources.passages if len(one.text) >= SHORTEST]
        self.named = [one for one in self.long if one.topic]
        self.by_kind: dict[str, list[Passage]] = {}
        for one in [*self.named, *sources.written]:
            self.by_kind.setdefault(one.kind, []).append(one)
        self.left = {language: luck.sample(texts, len(texts)) for language, texts in sources.foreign.items()}
        self.makers: dict[str, Callable[[], Row | None]] = {
            "conversation": self.conversation, "translate": self.translate, "summarise": self.summarise,
            "rewrite": self.rewrite, "answer": self.answer, "fact": self.fact}

    def instructions(self, count: int) -> list[Row]:
        """As they are. Where there are more than are wanted, the largest collections give way: one of each in turn,
        while it has any."""
        mixed = {name: self.luck.sample(rows, len(rows)) for name, rows in by_source(self.sources.rows).items()}
        turns = zip_longest(*mixed.values())
        chosen = [row for turn in turns for row in turn if row is not None][:count]
        return [{"prompt": row["prompt"]} for row in chosen]

    def conversation(self) -> Row | None:
        if not self.exchanges:
            return None
        luck, groups = self.luck, list(self.exchanges.values())
        rows = luck.choices(groups, [len(rows) ** 0.5 for rows in groups])[0]
        chosen = [luck.choice(rows) for _ in range(2 if luck.random() < LONGER else 1)]
        return kinds.follow_up(luck, [(row["prompt"], row["response"]) for row in chosen])

    def translate(self) -> Row | None:
        """Each foreign piece once, as long as they last."""
        language = self.luck.choices(("German", "French", ""), (GERMAN, FRENCH, 1.0 - GERMAN - FRENCH))[0]
        if self.left.get(language):
            return kinds.to_english(self.luck, language, self.left[language].pop())
        return kinds.from_english(self.luck, self.text(40, 220))

    def text(self, shortest: int, longest: int) -> str:
        """From anywhere."""
        luck = self.luck
        if self.sources.written and luck.random() < WRITTEN:
            return excerpt(luck, luck.choice(self.sources.written).text, shortest, longest)
        if self.long and luck.random() < 0.5:
            return excerpt(luck, luck.choice(self.long).text, shortest, longest)
        book = luck.choices(self.sources.books, [len(one) for one in self.sources.books])[0]
        return excerpt(luck, book, shortest, longest)

    def summarise(self) -> Row | None:
        """Of passages that are too short for it, several that follow each other."""
        luck = self.luck
        if self.long and luck.random() < NEIGHBOURS:
            begin = luck.randrange(len(self.long))
            text = "\n\n".join(one.text for one in self.long[begin:begin + luck.randint(2, 8)])
            return kinds.summarise(luck, text[:text.rfind(". ", 0, LONGEST) + 1])
        return kinds.summarise(luck, self.text(700, LONGEST))

    def rewrite(self) -> Row | None:
        return kinds.rewrite(self.luck, self.text(80, 900))

    def answer(self) -> Row | None:
        """A question, the passage that should answer it, and others that do not."""
        luck, about, kind = self.luck, self.sources.topics, ""
        named = self.sources.written if self.sources.written and luck.random() < WRITTEN else self.named
        if about is not None and named and (luck.random() < NAMED or not self.asked):
            passage = luck.choice(named)
            kind = passage.kind
            asked, text = kinds.question_for(luck, about, passage), excerpt(luck, passage.text, 400, 1400)
        elif self.asked:
            asked, text = luck.choice(self.asked)
        else:
            return None
        parts, count = [text], luck.randint(*PASSAGES)
        while len(parts) < count and sum(map(len, parts)) < LONGEST - 1000:
            alike = self.by_kind.get(kind, [])
            parts.append(excerpt(luck, luck.choice(alike).text, 300, 1000) if alike and luck.random() < ALIKE
                         else self.text(300, 1000))
        return kinds.answer(luck, asked, parts)

    def fact(self) -> Row | None:
        return None if self.sources.topics is None else {"prompt": question(self.luck, self.sources.topics)}


def by_source(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row.get("source", ""), []).append(row)
    return found


def mixed(luck: random.Random, sources: Sources, total: int) -> list[Row]:
    """With its "kind" in each, each once."""
    maker = Maker(luck, sources)
    found: dict[str, Row] = {}
    for kind, share in SHARES.items():
        count = round(share * total)
        made = maker.instructions(count) if kind == "instruction" else [maker.makers[kind]() for _ in range(count)]
        for row in filter(None, made):
            found.setdefault(json.dumps(row), {"kind": kind} | row)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/training_prompts.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="instructions: .jsonl or .jsonl.gz")
    parser.add_argument("--books", type=Path, nargs="+", required=True, help="UTF-8, plain or .gz")
    parser.add_argument("--german", type=Path, nargs="+", default=[], help="German texts, a paragraph a line")
    parser.add_argument("--french", type=Path, nargs="+", default=[], help="French texts")
    parser.add_argument("--passages", type=Path, nargs="+", default=[], help="English texts, or .jsonl by the target")
    parser.add_argument("--wordnet", type=Path, help="data.noun: what questions are asked about")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl.gz")
    parser.add_argument("--total", type=int, default=60000, help="prompts of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    luck = random.Random(given.seed)
    passages = read_passages(given.passages)
    foreign = {"German": given.german, "French": given.french}
    sources = Sources(
        rows=[json.loads(line) for line in read_text(given.prompts).split("\n") if line.strip()],
        books=books(given.books), foreign={language: pieces(luck, lines(paths)) for language, paths in foreign.items()},
        passages=[one for one in passages if not one.prompt], written=[one for one in passages if one.prompt],
        topics=None if given.wordnet is None else topics(given.wordnet))
    rows = mixed(luck, sources, given.total)
    with gzip.open(given.out, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    counts = Counter(row["kind"] for row in rows)
    print(f"{given.out}: {len(rows):,} prompts: " + ", ".join(f"{kind} {count:,}" for kind, count in counts.items()))


if __name__ == "__main__":
    main()
