"""Texts to summarise and to answer from, written by the target itself: news reports, articles, pages about what WordNet
has names for. `tools/training_prompts.py --passages` makes prompts of them.

    python tools/written_passages.py --wordnet data.noun.gz --count 6000 --out passages.jsonl.gz

A text follows from its number and --seed. Each line has the "prompt" that asked for it, its "kind", what it is about
("topic") and the "text", up to its last whole sentence.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.llm import LLM
from paceline.request import SamplingParams
from prompt_topics import Topics, happening, topics

NEWS = (
    "Write a news report about {topic}.", "Write a newspaper article about {topic}. Name people, places and numbers.",
    "Write a detailed news story about {topic}, with quotes from people who were there.",
    "You are a reporter. Report on {topic} in about 300 words.", "Write what a news agency would report about {topic}.")
ARTICLE = (
    "Write an encyclopedia article about {topic}.", "Write a detailed paragraph about {topic}.",
    "Write a short biography or description of {topic}, as in a lexicon.",
    "Explain to a curious reader what is known about {topic}.", "Write a blog post about {topic}.",
    "Write a page for a website that explains {topic}.", "Write a short essay on {topic}.")
NEWS_SHARE = 0.5
SHORTEST = 300
"""Characters of a text that is kept."""
VARIETY = 0.35
"""Different words among all of them: less, and it goes round in circles."""
SAMPLING = {"temperature": 0.6, "top_p": 0.95}


@dataclass(frozen=True)
class Asked:
    kind: str
    topic: str
    prompt: str


def asked(seed: int, number: int, about: Topics) -> Asked:
    luck = random.Random(f"{seed}:{number}")
    if luck.random() < NEWS_SHARE:
        topic = happening(luck, about)
        return Asked("news", topic, luck.choice(NEWS).format(topic=topic))
    # As often a person as a place: there are so many more of some kinds that few others would come.
    kind = luck.choice(list(about))
    topic = luck.choice(about[kind])
    return Asked(kind, topic, luck.choice(ARTICLE).format(topic=topic))


def whole(text: str) -> str:
    """Up to the last sentence that ends."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"'”)]*(?=\s|$)", text)]
    return text[:ends[-1]].strip() if ends else ""


def readable(text: str) -> bool:
    words = text.lower().split()
    return len(text) >= SHORTEST and len(set(words)) >= VARIETY * len(words)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/written_passages.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the target; default: the default model")
    parser.add_argument("--wordnet", type=Path, required=True, help="WordNet's data.noun, plain or .gz")
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--new-tokens", type=int, default=600, help="longest text")
    parser.add_argument("--at-once", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help=".jsonl.gz")
    given = parser.parse_args()
    about = topics(given.wordnet)
    llm = LLM(given.model, device=given.device, heads=(), max_model_len=given.new_tokens + 128,
              max_num_seqs=given.at_once)
    begin, kept, tokens = time.monotonic(), 0, 0
    part = 4 * given.at_once  # parts run dry at their ends, so they are large
    with gzip.open(given.out, "wt", encoding="utf-8") as file:
        for first in range(0, given.count, part):
            wanted = [asked(given.seed, number, about) for number in range(first, min(first + part, given.count))]
            params = [SamplingParams(max_tokens=given.new_tokens, seed=given.seed + first + place, **SAMPLING)
                      for place in range(len(wanted))]
            outputs = llm.chat([[{"role": "user", "content": one.prompt}] for one in wanted], params)
            for one, output in zip(wanted, outputs):
                text = whole(output.outputs[0].text) if output.error is None else ""
                tokens += len(output.outputs[0].token_ids) if output.error is None else 0
                if readable(text):
                    file.write(json.dumps(asdict(one) | {"text": text}) + "\n")
                    kept += 1
            rate = tokens / (time.monotonic() - begin)
            print(f"{first + len(wanted):,} of {given.count:,}: {kept:,} kept, {rate:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
