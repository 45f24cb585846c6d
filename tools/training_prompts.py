"""More kinds of prompts to train drafters on, made of those that there are: texts to summarise, passages to answer
from, sentences to translate or to rewrite. Collections of instructions hardly have long prompts, and a head that has
never read one drafts badly behind it.

    python tools/training_prompts.py --prompts prompts.jsonl.gz --books pride.txt.gz war.txt.gz --out mixed.jsonl.gz

The same files and --seed give the same prompts. Lines of --prompts have "prompt" and, where it is known, "response":
what was answered there becomes the passage that holds an answer. Nothing of it is learned from: heads learn from the
target's own answers alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

from paceline.measure.perplexity import read_text
from tiny_family import books

SUMMARISE = (
    "Summarize: {text}", "Summarize the following text.\n\n{text}", "Write a short summary of this passage:\n{text}",
    "{text}\n\nSummarize the above in a few sentences.", "Give the main points of the following text.\n\n{text}",
    "TL;DR of this:\n\n{text}", "What happens in this passage? {text}")
ANSWER = (
    "Answer the question with the help of these passages.\n\n{text}\n\nQuestion: {question}",
    "{text}\n\nUse what is written above to answer: {question}",
    "Here is some context:\n{text}\n\nBased on this context, {question}",
    "You are given some documents.\n\n{text}\n\nAnswer this: {question}\nAnswer:")
TRANSLATE = (
    "Translate English to {language}: {text}", "Translate into {language}: {text}",
    "How would you say this in {language}? \"{text}\"", "{text}\n\nTranslate the above into {language}.")
LANGUAGES = ("German", "French", "Spanish", "Italian")
REWRITE = (
    "Rewrite this in simpler words: {text}", "Rephrase the following sentence: {text}",
    "Correct the grammar of this text: {text}", "List the people and places that are named here: {text}",
    "Rewrite the following as a list of points:\n{text}", "Continue this story:\n\n{text}")
LENGTHS = {"summarise": (600, 4500), "answer": (300, 1400), "translate": (40, 220), "rewrite": (80, 900)}
"""Characters of a text, or of each passage."""
PASSAGES = (2, 5)


def passage(luck: random.Random, texts: list[str], lengths: tuple[int, int]) -> str:
    """Whole sentences from anywhere in the texts, about so many characters."""
    text = luck.choices(texts, [len(one) for one in texts])[0]
    length = round(lengths[0] * (lengths[1] / lengths[0]) ** luck.random())
    begin = luck.randrange(max(1, len(text) - length - 400))
    begin = max(text.find(". ", begin, begin + 400), begin - 2) + 2
    end = text.find(". ", begin + length, begin + length + 400)
    return text[begin:end + 1 if end >= 0 else begin + length].strip()


def made(luck: random.Random, texts: list[str], answered: list[tuple[str, str]], count: int) -> list[str]:
    """So many of each kind, twice as many of the two long ones."""
    found = [luck.choice(SUMMARISE).format(text=passage(luck, texts, LENGTHS["summarise"])) for _ in range(2 * count)]
    for _ in range(2 * count if answered else 0):
        question, response = luck.choice(answered)
        others = [luck.choice(answered)[1] if luck.random() < 0.6 else passage(luck, texts, LENGTHS["answer"])
                  for _ in range(luck.randint(*PASSAGES))]
        parts = luck.sample([response, *others], 1 + len(others))
        text = "\n\n".join(f"Passage {place}: {part}" if luck.random() < 0.5 else part
                           for place, part in enumerate(parts, 1))
        found.append(luck.choice(ANSWER).format(text=text, question=question))
    for _ in range(count):
        found.append(luck.choice(TRANSLATE).format(language=luck.choice(LANGUAGES),
                                                   text=passage(luck, texts, LENGTHS["translate"])))
        found.append(luck.choice(REWRITE).format(text=passage(luck, texts, LENGTHS["rewrite"])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/training_prompts.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl or .jsonl.gz; all of them are kept")
    parser.add_argument("--books", type=Path, nargs="+", required=True, help="UTF-8, plain or .gz")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl.gz")
    parser.add_argument("--each", type=int, default=4000, help="new prompts of each short kind; long ones: twice")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = [json.loads(line) for line in read_text(given.prompts).split("\n") if line.strip()]
    prompts = [str(row["prompt"]) for row in rows]
    answered = [(str(row["prompt"]), str(row["response"])) for row in rows
                if 60 <= len(row.get("response") or "") <= LENGTHS["answer"][1] and len(row["prompt"]) <= 300]
    new = made(random.Random(given.seed), books(given.books), answered, given.each)
    with gzip.open(given.out, "wt", encoding="utf-8", compresslevel=6) as file:
        for prompt in dict.fromkeys([*prompts, *new]):
            file.write(json.dumps({"prompt": prompt}) + "\n")
    print(f"{given.out}: {len(prompts):,} prompts and {len(new):,} made of them")


if __name__ == "__main__":
    main()
