"""The wordings of made prompts, and how a prompt of each kind is put together from texts. See training_prompts.py."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from prompt_topics import Topics, ask

SUMMARISE = (
    "Summarize: {text}", "Summarize the following text.\n\n{text}", "Write a short summary of this passage:\n{text}",
    "{text}\n\nSummarize the above in a few sentences.", "Give the main points of the following text.\n\n{text}",
    "TL;DR of this:\n\n{text}", "What happens in this passage? {text}", "Summarize this article: {text}",
    "Please summarise the following news article in three sentences.\n\n{text}", "{text}\n\nTL;DR:",
    "Article: {text}\n\nSummary:", "Read this report and tell me what happened.\n\n{text}",
    "Shorten this to its most important facts:\n\n{text}",
    "Write a headline and a two sentence summary for this.\n\n{text}",
    "Give me the highlights of this article as bullet points:\n{text}")
ANSWER = (
    "Answer the question with the help of these passages.\n\n{text}\n\nQuestion: {question}",
    "{text}\n\nUse what is written above to answer: {question}",
    "Here is some context:\n{text}\n\nBased on this context, {question}",
    "You are given some documents.\n\n{text}\n\nAnswer this: {question}\nAnswer:",
    "Context information is below.\n\n{text}\n\nGiven the context and nothing else, answer the question: {question}",
    "Question: {question}\n\nSearch results:\n{text}\n\nAnswer the question from the search results.",
    "Read these excerpts of articles.\n\n{text}\n\n{question}", "Q: {question}\n\n{text}\n\nA:",
    "I found these passages. {question}\n\n{text}")
OF_NEWS = (
    "what happened?", "who is involved in {topic}?", "What do you know about {topic}?",
    "when and where did this happen: {topic}?", "What were the consequences of {topic}?", "What led to {topic}?",
    "What do people say about {topic}?", "how many people are affected by {topic}?")
OF_ANYTHING = (
    "What is known about {topic}?", "Tell me about {topic}.", "what is special about {topic}",
    "Where does {topic} come from?", "Why is {topic} mentioned?", "What happened to {topic}?")
LABELS = ("Passage {place}: ", "[{place}] ", "Document {place}: ", "({place}) ", "", "Source {place}\n", "- ")
TO_ENGLISH = (
    "Translate {language} to English: {text}", "Translate the following {language} text into English.\n\n{text}",
    "Translate into English: {text}", "What does this mean in English? {text}",
    "{text}\n\nTranslate the above into English.",
    "Please translate this {language} sentence to English: \"{text}\"", "English translation of: {text}",
    "How would you say this in English? \"{text}\"", "{language}: {text}\nEnglish:",
    "Give me an English translation of this {language} text: {text}", "Translate from {language} to English.\n{text}")
FROM_ENGLISH = (
    "Translate English to {language}: {text}", "Translate into {language}: {text}",
    "How would you say this in {language}? \"{text}\"", "{text}\n\nTranslate the above into {language}.")
LANGUAGES = ("German", "French", "Spanish", "Italian")
REWRITE = (
    "Rewrite this in simpler words: {text}", "Rephrase the following sentence: {text}",
    "Correct the grammar of this text: {text}", "List the people and places that are named here: {text}",
    "Rewrite the following as a list of points:\n{text}", "Continue this story:\n\n{text}")

ABOUT_TEXT = (
    "Can you explain the second point?", "Now make it shorter.", "Rewrite it as a table.", "Make it sound more formal.",
    "Say that again for a ten-year-old.", "Give me an example.", "Why is that?", "Are you sure? Check it once more.",
    "Rewrite your answer as bullet points.", "Turn it into a short poem.", "What are the arguments against this?",
    "Now write it from the point of view of somebody who disagrees.", "Add more detail to the first part.",
    "Summarize your answer in one sentence.", "Translate your answer into German.", "What should I do next?",
    "Rewrite it so that every sentence has fewer than ten words.", "Can you give me three more like this?",
    "What would be a good title for this?", "How would an expert put it?", "Now turn it into an email to a colleague.",
    "Which part of this matters most, and why?", "Continue.", "Thanks! And what is the history behind this?",
    "Rewrite it with a different ending.", "Take your answer and replace every name by another one.",
    "Evaluate your answer: what could be better?", "List five questions that somebody might ask about this.")
ABOUT_CODE = (
    "Explain how this code works, line by line.", "What is its time complexity?", "Now write it in {programming}.",
    "Add comments to the code.", "How would you test it? Write some tests.", "What happens if the input is empty?",
    "Can you make it faster?", "Rewrite it without using any library.", "Add error handling.",
    "Is there a bug in it?", "Make it a class.", "Write it so that it uses less memory.")
PROGRAMMING = ("Python", "Java", "C++", "JavaScript", "Rust", "Go")
ABOUT_SUM = (
    "How did you get the last step?", "What would the answer be if the first number were twice as large?",
    "Can you solve it with an equation?", "Check your answer.", "Explain it to a child.",
    "Give me a similar problem with its solution.", "What would change if there were one more?",
    "Is there a shorter way?", "Round the result and explain what it means.")


@dataclass(frozen=True)
class Passage:
    """`topic`: what it is about, of which `kind` of prompt_topics; both empty where nobody knows. `prompt`: what it
    answers, if anything."""

    text: str
    kind: str = ""
    topic: str = ""
    prompt: str = ""


Row = dict[str, object]
"""Of the file of prompts."""


SENTENCE_END = re.compile(r"(?<=[^\d\s][.!?])[\"“”»«]?\s+(?=[A-ZÄÖÜÉÈÀ\"„“»«])")
"""Between two sentences; not behind a number: 'der 5. Dalai Lama'."""


def excerpt(luck: random.Random, text: str, shortest: int, longest: int) -> str:
    """Whole sentences from anywhere in the text: about so many characters, or all there are."""
    length = round(shortest * (longest / shortest) ** luck.random())
    if len(text) <= length:
        return text.strip()
    start = SENTENCE_END.search(text, luck.randrange(len(text) - length))
    begin = start.end() if start and start.end() + shortest < len(text) else 0
    end = SENTENCE_END.search(text, begin + length - 1, begin + length + longest)
    return text[begin:end.start() if end else begin + length + longest].strip()


def summarise(luck: random.Random, text: str) -> Row:
    return {"prompt": luck.choice(SUMMARISE).format(text=text)}


def answer(luck: random.Random, question: str, passages: list[str]) -> Row:
    """In any order, labelled in one way or another."""
    label = luck.choice(LABELS)
    text = "\n\n".join(label.format(place=place) + part
                       for place, part in enumerate(luck.sample(passages, len(passages)), 1))
    return {"prompt": luck.choice(ANSWER).format(text=text, question=question)}


def question_for(luck: random.Random, about: Topics, passage: Passage) -> str:
    if passage.kind in about:
        return ask(luck, about, passage.kind, passage.topic)
    return luck.choice(OF_NEWS if passage.kind == "news" else OF_ANYTHING).format(topic=passage.topic)


def to_english(luck: random.Random, language: str, text: str) -> Row:
    return {"prompt": luck.choice(TO_ENGLISH).format(language=language, text=text)}


def from_english(luck: random.Random, text: str) -> Row:
    return {"prompt": luck.choice(FROM_ENGLISH).format(language=luck.choice(LANGUAGES), text=text)}


def rewrite(luck: random.Random, text: str) -> Row:
    return {"prompt": luck.choice(REWRITE).format(text=text)}


def follow_up(luck: random.Random, exchanges: list[tuple[str, str]]) -> Row:
    """One more question behind what was said, of a kind that goes with the last answer."""
    last = exchanges[-1][1]
    code = re.search(r"\b(def|function|import|return|class|print|SELECT)\b.*[(;:{]", last)
    later = ABOUT_CODE if code else ABOUT_SUM if "####" in last else ABOUT_TEXT
    turns = [{"role": role, "content": text} for prompt, response in exchanges
             for role, text in (("user", prompt), ("assistant", spoken(response)))]
    asked = luck.choice(later).format(programming=luck.choice(PROGRAMMING))
    return {"messages": [*turns, {"role": "user", "content": asked}]}


def spoken(response: str) -> str:
    """Without the marks of GSM8K's calculator."""
    return re.sub(r"<<[^>]*>>", "", response).replace("####", "The answer is")
