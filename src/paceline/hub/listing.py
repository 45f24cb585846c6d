"""Which files a repository on the hub has, and which of them make a model. Names from there are anybody's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.hub.client import Hub
from paceline.hub.names import HubName

SAFETENSORS = "safetensors"
"""The variant that is no GGUF file."""
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q8_0", "Q5_K_M", "Q6_K", "Q5_K_S", "F16", "BF16", "F32")
"""Of a GGUF repository where nobody says which."""
MOST_FILES = 20_000
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_QUANT = re.compile(r"(?i)(?:^|[-._])((?:IQ|TQ|Q)\d\w*|BF16|F16|FP16|F32|MXFP4\w*)(?P<split>-\d{5}-of-\d{5})?\.gguf$")
_COMPANION = re.compile(r"(?i)mmproj|imatrix")
"""GGUF files that are no language models."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository."""

    path: str
    bytes: int
    oid: str
    """Of its content, by the hub's account."""
    sha256: str | None
    """Where the hub tells it: of large files."""

    @property
    def name(self) -> str:
        """What it is called here: the last part of its path, and nothing that leads out of a folder."""
        parts = self.path.split("/")
        if not all(_SAFE.fullmatch(part) for part in parts):
            raise ModelFormatError(f"The hub names a file {self.path[:80]!r}, which no file here shall be called: the "
                                   "repository cannot be pulled.")
        return parts[-1]


@dataclass(frozen=True, slots=True)
class Repository:
    """At one commit."""

    repo: str
    commit: str
    licence: str | None
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """The files that make one model of a repository."""

    name: str
    """A quantisation of GGUF files, or SAFETENSORS."""
    files: tuple[HubFile, ...]


def read_repository(hub: Hub, repo: str) -> Repository:
    about, _ = hub.json(f"api/models/{repo}/revision/main", repo)
    commit = about.get("sha") if isinstance(about, dict) else None
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-fA-F]{7,64}", commit):
        raise ModelNotFoundError(f"{hub.host} does not answer like a hub when it is asked for '{repo}': check "
                                 "HF_ENDPOINT.")
    card = about.get("cardData")
    licence = card.get("license") if isinstance(card, dict) else None
    files: list[HubFile] = []
    page: str | None = f"api/models/{repo}/tree/{commit}?recursive=true"
    while page is not None:
        entries, page = hub.json(page, repo)
        files += [file for file in map(_file, entries if isinstance(entries, list) else ()) if file is not None]
        if not isinstance(entries, list) or len(files) > MOST_FILES:
            raise ModelNotFoundError(f"The list of files of '{repo}' on {hub.host} cannot be understood: check "
                                     "HF_ENDPOINT.")
    return Repository(repo, commit, licence if isinstance(licence, str) else None, tuple(files))


def _file(entry: Any) -> HubFile | None:
    if not isinstance(entry, dict) or entry.get("type") != "file":
        return None
    path, size, oid, large = entry.get("path"), entry.get("size"), entry.get("oid"), entry.get("lfs")
    if not isinstance(path, str) or not isinstance(size, int) or isinstance(size, bool) or size < 0:
        return None
    sha256 = large.get("oid") if isinstance(large, dict) else None
    known = isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) is not None
    return HubFile(path, size, oid if isinstance(oid, str) else "", sha256 if known else None)


def address(repository: Repository, file: HubFile) -> str:
    return f"{repository.repo}/resolve/{repository.commit}/{quote(file.path)}"


def choose(repository: Repository, name: HubName) -> Variant:
    """The model that `name` means in this repository."""
    ggufs = _ggufs(repository.files)
    if name.quant is not None:
        if name.quant not in ggufs:
            raise ModelNotFoundError(f"'{repository.repo}' has no GGUF file of {name.quant}: {_offers(repository)}.")
        return _single(repository, name.quant, ggufs[name.quant])
    top = [file for file in repository.files if "/" not in file.path]
    weights = [file for file in top if file.path.endswith(".safetensors")]
    if weights:
        # Some repositories have their weights twice; those that transformers reads are called model.
        weights = [file for file in weights if re.match(r"model[-.]", file.path)] or weights
        texts = [file for file in top if file.path.endswith((".json", ".jinja"))]
        return Variant(SAFETENSORS, tuple(texts + weights))
    for quant in (*PREFERRED, *ggufs):
        if quant in ggufs:
            return _single(repository, quant, ggufs[quant])
    raise ModelNotFoundError(f"'{repository.repo}' has no safetensors and no GGUF file, so there is nothing to run: "
                             "name another repository.")


def quant_of(file_name: str) -> str:
    """By the end of its name; "GGUF" where that says nothing."""
    found = _QUANT.search(file_name)
    return found[1].upper() if found else "GGUF"


def _ggufs(files: Sequence[HubFile]) -> dict[str, list[HubFile]]:
    found: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: (len(file.path), file.path)):
        if file.path.endswith(".gguf") and not _COMPANION.search(file.path):
            found.setdefault(quant_of(file.path), []).append(file)
    return found


def _single(repository: Repository, quant: str, files: Sequence[HubFile]) -> Variant:
    """Of several files of a quantisation the one with the shortest name: others add what makes them special."""
    whole = [file for file in files if not re.search(r"-\d{5}-of-\d{5}\.gguf$", file.path)]
    if not whole:
        raise ModelNotFoundError(f"'{repository.repo}' has {quant} only in {len(files)} parts, which Paceline does not "
                                 f"put together: choose another one; {_offers(repository)}.")
    return Variant(quant, (whole[0],))


def _offers(repository: Repository) -> str:
    found = sorted(_ggufs(repository.files))
    return f"it has {', '.join(found)}" if found else "it has no GGUF files"
