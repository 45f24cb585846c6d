"""What prompts can be about: names and things of WordNet, the questions one asks of them, and events that news report.

WordNet 3.0's data.noun (plain or .gz) has a line for every meaning: in which file of its authors it was, words,
pointers to others, and what it means. An instance (pointer @i) has a name of its own: a person, a city, a war.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from paceline.measure.perplexity import read_text

Topics = dict[str, list[str]]
"""Names by kind: a key of QUESTIONS."""

NAMED = {"18": "person", "15": "place", "17": "nature", "11": "event", "10": "work", "04": "event"}
"""Files of instances; 15: countries and cities, 17: rivers, mountains, stars."""
COMMON = {"05": "animal", "20": "plant", "19": "phenomenon", "13": "food", "27": "substance", "09": "idea",
          "06": "thing", "26": "condition", "22": "process"}
"""Files of what has no name of its own."""
MEANING = {
    "place": r"city|town|capital|port|republic|monarchy|kingdom|country|island",
    "condition": r"disease|disorder|inflam|infect|pain|fever|symptom",
    "idea": r"science|study|theory|branch|method|principle|belief|doctrine",
    "thing": r"device|machine|instrument|vehicle|tool|weapon|used"}
"""What must be in the meaning, where a file has more than its kind is asked about."""
FULL = ("person", "event")
LINE = re.compile(r"\d{8} (\d\d) n ([0-9a-f]{2}) (.*?) \d{3} (.*?)\| (.*)")

QUESTIONS = {
    "person": (
        "Who was {name}?", "When was {name} born?", "Where was {name} born?", "What is {name} best known for?",
        "When did {name} die?", "what did {name} do", "What nationality was {name}?", "Who influenced {name}?",
        "Name one achievement of {name}.", "Why is {name} important?", "who is {name}",
        "In which century did {name} live?",
        "Tell me about {name}."),
    "place": (
        "Where is {name}?", "What is {name} known for?", "Which country is {name} in?", "When was {name} founded?",
        "what language do they speak in {name}", "How many people live in {name}?",
        "What is the climate of {name} like?",
        "What are three things to see in {name}?", "Who founded {name}?", "What currency is used in {name}?",
        "what time zone is {name} in", "What is the history of {name}?"),
    "nature": (
        "Where is {name}?", "How large is {name}?", "what is {name}", "How was {name} formed?",
        "Who discovered {name}?", "what countries does {name} touch", "Why is {name} famous?"),
    "event": (
        "When did the {name} take place?", "What caused the {name}?", "Who took part in the {name}?",
        "what happened in the {name}", "How did the {name} end?", "Why was the {name} important?",
        "who won the {name}"),
    "work": (
        "Who wrote {name}?", "What is {name} about?", "When was {name} written?", "what does {name} mean",
        "Why is {name} important?"),
    "animal": (
        "What does a {name} eat?", "Where do {name}s live?", "How long does a {name} live?", "what is a {name}",
        "How big is a {name}?", "Is the {name} endangered?", "How do {name}s raise their young?"),
    "plant": (
        "Where does {name} grow?", "What is {name} used for?", "what does {name} look like", "How do you grow {name}?",
        "Is {name} poisonous?"),
    "phenomenon": (
        "What causes {name}?", "what is {name}", "How is {name} measured?",
        "Explain {name} in simple terms.", "Why does {name} happen?"),
    "food": (
        "What is {name} made of?", "Where does {name} come from?", "how do you make {name}", "Is {name} healthy?",
        "How long does {name} keep?"),
    "substance": (
        "What is {name} used for?", "How is {name} made?", "what is the chemical formula of {name}",
        "Is {name} dangerous?", "Who discovered {name}?"),
    "idea": (
        "What is {name}?", "Who came up with {name}?", "Can you give an example of {name}?", "define {name}",
        "Why does {name} matter?", "What is the difference between {name} and {other}?"),
    "thing": (
        "Who invented the {name}?", "How does a {name} work?", "what is a {name} used for",
        "When was the {name} invented?", "What is the difference between a {name} and a {other}?"),
    "condition": (
        "What are the symptoms of {name}?", "What causes {name}?", "how is {name} treated", "Is {name} common?",
        "Can {name} be prevented?"),
    "process": (
        "How does {name} work?", "What is {name}?", "what causes {name}", "Give an example of {name}."),
}

HAPPENINGS = (
    "a flood in {place}", "the election of a new mayor in {place}", "the opening of a railway line to {place}",
    "a fire in a warehouse in {place}", "a strike of bus drivers in {place}", "an earthquake near {place}",
    "a football match between {place} and {other}", "a court ruling on a dispute over land near {place}",
    "the discovery of old coins near {place}", "a hospital in {place} that runs out of beds",
    "a company in {place} that lays off five hundred people", "a rescue of climbers near {place}",
    "a summit of ministers in {place}", "rising rents in {place}", "a storm that cut off power in {place}",
    "a robbery in a jewellery shop in {place}", "a new museum about {person} in {place}",
    "a study on {condition} by doctors in {place}", "a row over a statue of {person} in {place}",
    "a train accident between {place} and {other}", "a record price for a letter by {person}",
    "a shortage of {food} in {place}", "the return of the {animal} to the region around {place}",
    "a protest against a new airport near {place}", "a film festival in {place}", "a drought around {place}",
    "a trial of a former minister in {place}", "a school in {place} that won a prize",
    "a tennis player from {place} who won her first title", "a bank in {place} that was fined",
    "the recall of a {thing} after complaints from customers", "a marathon in {place}",
    "a ceasefire in the conflict near {place}", "an outbreak of {condition} in {place}",
    "a missing child who was found near {place}", "a power plant near {place} that will close",
    "a biography of {person} that was published this week", "a new law on {substance} in {place}")


def topics(path: Path) -> Topics:
    """All names of one to four words that are not too strange."""
    found: dict[str, dict[str, None]] = {kind: {} for kind in QUESTIONS}
    for line in read_text(path).split("\n"):
        match = LINE.match(line)
        if match is None:
            continue
        number, count, words, pointers, gloss = match.groups()
        instance = re.search(r"@i ", pointers) is not None
        kind = (NAMED if instance else COMMON).get(number)
        names = [word.replace("_", " ") for word in words.split(" ")[:2 * int(count, 16):2]]
        if kind is None or not re.search(MEANING.get(kind, "."), gloss):
            continue
        # The fullest name says best what is meant; of common words the first is the usual one.
        name = max(names, key=lambda one: (min(len(one.split()), 3), len(one))) if kind in FULL else names[0]
        usual = name != name.lower() if instance else name.islower() and len(names) > 1
        if usual and len(name.split()) <= 4 and re.fullmatch(r"[A-Za-z' .-]{3,40}", name) and "genus" not in name:
            found[kind].setdefault(name)
    return {kind: list(names) for kind, names in found.items()}


def question(luck: random.Random, about: Topics) -> str:
    """Of the kinds with names more often, as people ask."""
    kind = luck.choices(list(QUESTIONS), [6, 5, 2, 3, 1, *[1] * (len(QUESTIONS) - 5)])[0]
    return ask(luck, about, kind, luck.choice(about[kind]))


def ask(luck: random.Random, about: Topics, kind: str, name: str) -> str:
    pattern = luck.choice(QUESTIONS[kind])
    asked = pattern.format(name=name, other=luck.choice(about[kind])).replace("the The ", "the ")
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", asked)


def happening(luck: random.Random, about: Topics) -> str:
    """What a news report could be about."""
    pick = {kind: luck.choice(names) for kind, names in about.items()}
    return luck.choice(HAPPENINGS).format(**pick, other=luck.choice(about["place"]))
