"""Plain prose out of files that come in free packages: catalogues of translations, manuals, dictionaries. One
paragraph a line, each once; what is markup, code or a list is left out.

    python tools/package_texts.py --language de locale/de/*.mo handbook/*.html ding/de-en.txt --out german.txt.gz
    python tools/package_texts.py --language en --originals locale/de/*.mo foldoc.dict.dz --out english.txt.gz
"""

from __future__ import annotations

import argparse
import gettext
import gzip
import html
import re
from collections.abc import Iterator
from pathlib import Path

PROSE = re.compile(r"[A-ZÄÖÜ\"„“»].*[.?!][\"“”«]?")
MARKUP = re.compile(r"[<>{}\\|$@#%*=^~_\[\]]|https?:|\.\.\.|--|\d\.\d\.\d|\b[A-Z]{5,}\b")
"""Whatever is left of these once tags are gone: such a paragraph is not prose."""

COMMON = {"en": " the a and of to is are in it you that for with this was be not i he ",
          "de": " der die das und ist nicht ein eine zu den dem mit sie ich es auf für von wir er im sich ",
          "fr": " le la les des et est que un une vous je pas pour dans il de nous ce du en qui "}
"""Words by which a language is known: what was not translated is still in English."""


def catalogue(path: Path, originals: bool) -> Iterator[str]:
    """Of a .mo file: the translations, or what was translated."""
    with path.open("rb") as file:
        texts = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    for original, translated in texts.items():
        if isinstance(original, str):
            text = original.split("\x04")[-1] if originals else translated
            yield from re.split(r"\n\s*\n", text)


def pages(path: Path) -> Iterator[str]:
    for _, text in re.findall(r"<(p|div class=\"para\")(?:\s[^>]*)?>(.*?)</(?:p|div)>", path.read_text("utf-8"), re.S):
        yield html.unescape(re.sub(r"<[^>]*>", "", text))


def entries(path: Path) -> Iterator[str]:
    """Of a dictionary for dictd: what each headword means, without the marks of links and of subjects."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    for word, body in re.findall(r"^(\S[^\n]*)\n((?:\n|[ \t]+[^\n]*\n)+)", text, re.M):
        said = [re.sub(r"\s+", " ", re.sub(r"[{}]|<[^>]*>", "", part)).strip()
                for part in re.split(r"\n\s*\n", body) if not re.match(r"\s*[\[(]", part)]
        found = " ".join(part for part in said if PROSE.fullmatch(part) and not MARKUP.search(part))
        if len(found) >= 200:
            yield f"{word[0].upper()}{word[1:].strip()}: {found}"


def examples(path: Path) -> Iterator[str]:
    """Of a Ding dictionary (foreign :: English, parts between |): those that are sentences."""
    for line in path.read_text("utf-8").split("\n"):
        for part in line.split("::")[0].split("|") if "::" in line else ():
            text = re.sub(r"\s*[\[{(<][^\]})>]*[\]})>]", "", part)
            if ";" not in text and "/" not in text and len(text.split()) >= 7:
                yield text


def texts(path: Path, originals: bool) -> Iterator[str]:
    if path.suffix == ".mo":
        return catalogue(path, originals)
    if path.suffix == ".dz":
        return entries(path)
    return pages(path) if path.suffix in (".html", ".page") else examples(path)


def clean(text: str, language: str) -> str | None:
    """One line; None: no prose, or not in that language."""
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text)).strip()
    words = text.lower().split()
    votes = {name: sum(f" {word} " in known for word in words) for name, known in COMMON.items()}
    whole = PROSE.fullmatch(text) and not MARKUP.search(text) and len(words) >= 7
    return text if whole and max(votes, key=votes.__getitem__) == language else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/package_texts.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help=".mo, .html, .page, .dict.dz, or a Ding dictionary")
    parser.add_argument("--originals", action="store_true", help="of catalogues: what was translated")
    parser.add_argument("--out", type=Path, required=True, help=".txt.gz")
    parser.add_argument("--language", choices=sorted(COMMON), required=True)
    given = parser.parse_args()
    language = given.language
    found = dict.fromkeys(line for path in given.files for text in texts(path, given.originals)
                          if (line := clean(text, language)) is not None)
    with gzip.open(given.out, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in found)
    print(f"{given.out}: {len(found):,} paragraphs, {sum(len(line.split()) for line in found):,} words")


if __name__ == "__main__":
    main()
