"""Talking to the hub: redirects, tokens, waiting and giving up, with nothing but Python's own urllib.

The token goes to the hub that was asked and to nobody it redirects to, and no message ever names it, nor an address
with its query, which may be signed.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from paceline.errors import ConfigError, ModelNotFoundError

HUB = "https://huggingface.co"
MOST_REDIRECTS = 10
MOST_TRIES = 5
"""In a row that brought nothing."""
LONGEST_WAIT_S = 60.0
"""A hub that wants to be left alone for longer is told about instead of waited for."""
MOST_JSON_BYTES = 1 << 26
_REDIRECTS = (301, 302, 303, 307, 308)
_FAULTS = (OSError, http.client.HTTPException)
"""Of a connection that broke; urllib's own errors are OSErrors."""


class Broken(Exception):
    """A request that failed and may work when it is sent again. `wait_s`: when, where the hub has said so."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class NoSuchRange(Broken):
    """There is less of a file than is here of it."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """They are followed by hand, because urllib would take the token along."""

    def redirect_request(self, *ignored: Any) -> None:
        return None


@dataclass
class Hub:
    """A hub, or a mirror of it."""

    endpoint: str = HUB
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    _reached: bool = False
    """Whether it has ever answered: a connection that fails before is no accident to try again after."""

    def __post_init__(self) -> None:
        self.endpoint = self.endpoint.rstrip("/")
        if "@" in self.endpoint:  # not shown: it may be a password
            raise ConfigError("HF_ENDPOINT names a user, which is not sent: write the address alone, and a token in "
                              "HF_TOKEN.")
        if not _is_web_address(self.endpoint):
            raise ConfigError(f"HF_ENDPOINT is {self.endpoint!r}, which is no address of a hub: write one like {HUB}.")
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise ConfigError("HF_TOKEN holds something else than letters, digits and signs: copy the token again, "
                              "nothing before or after it.")
        self._opener = urllib.request.build_opener(_NoRedirects)

    @classmethod
    def of_environment(cls) -> Hub:
        """HF_ENDPOINT names a mirror, HF_TOKEN opens what is gated."""
        # The end of a line often comes along with a token that was read from a file.
        return cls(os.environ.get("HF_ENDPOINT") or HUB, os.environ.get("HF_TOKEN", "").strip() or None)

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint).netloc

    def json(self, path: str, of: str) -> tuple[Any, str | None]:
        """What the hub answers at `path` (or at an address it gave), and where it goes on. `of`: the model asked
        about, for errors."""
        tries = Tries(self.sleep)
        while True:
            try:
                with self.open(path, of) as reply:
                    text = _all(reply)
                    further = _next(reply.headers.get("Link"), reply.url)
                try:
                    return json.loads(text), further
                except (ValueError, RecursionError):
                    raise ModelNotFoundError(f"{self.host} does not answer like a hub when it is asked for '{of}': "
                                             "check HF_ENDPOINT, or whether this network wants a login.") from None
            except Broken as problem:
                tries.failed(problem, f"'{of}' could not be looked up on {self.host}")

    def open(self, path: str, of: str, headers: Mapping[str, str] | None = None) -> http.client.HTTPResponse:
        """The answer to a GET, redirects followed. Broken where it is worth another try, else a ModelNotFoundError
        that says what to do."""
        if offline():
            raise ModelNotFoundError(f"'{of}' is not on this machine and HF_HUB_OFFLINE is set, so the hub is not "
                                     "asked: unset it, or give the path of a model you have.")
        url = urljoin(f"{self.endpoint}/", path)
        for _ in range(MOST_REDIRECTS):
            request = urllib.request.Request(url, headers={"User-Agent": "paceline", "Accept-Encoding": "identity",
                                                           **(headers or {})})
            if self.token is not None and _origin(urlsplit(url)) == _origin(urlsplit(self.endpoint)):
                request.add_header("Authorization", f"Bearer {self.token}")
            try:
                reply: http.client.HTTPResponse = self._opener.open(request, timeout=self.timeout_s)
                self._reached = True
                return reply
            except urllib.error.HTTPError as answer:
                self._reached = True
                with answer:
                    if answer.code not in _REDIRECTS:
                        raise self._refusal(answer, of) from None
                    url = _further(url, answer.headers.get("Location"), of)
            except (*_FAULTS, ValueError) as problem:
                raise self._unreachable(problem, of) from None
        raise ModelNotFoundError(f"{self.host} sends whoever asks for '{of}' in circles: check HF_ENDPOINT.")

    def _unreachable(self, problem: Exception, of: str) -> Exception:
        reason = getattr(problem, "reason", problem)
        said = getattr(reason, "strerror", None) or str(reason) or type(problem).__name__
        if self._reached:
            return Broken(said)
        return ModelNotFoundError(f"'{of}' is not on this machine and the hub ({self.host}) cannot be reached ({said}):"
                                  " check the network, name a mirror in HF_ENDPOINT, or give the path of a model you "
                                  "have.")

    def _refusal(self, answer: urllib.error.HTTPError, of: str) -> Exception:
        code, said = answer.code, answer.headers.get("X-Error-Code", "")
        if code == 416:
            return NoSuchRange("the range that was asked for is not there")
        if code in (408, 425, 429) or code >= 500:
            return Broken(f"it answered {code}", _wait(answer.headers.get("Retry-After")))
        if code in (401, 403) and (said == "GatedRepo" or self.token is None) and said != "RepoNotFound":
            return ModelNotFoundError(f"{self.host} gives '{of}' to known users only: accept its terms there, if it "
                                      "has any, and set HF_TOKEN to a token of yours (and check the spelling).")
        if code in (401, 403, 404):
            return ModelNotFoundError(f"{self.host} has no '{of}'" + (
                " that this HF_TOKEN may read" if self.token is not None else "")
                + ": check the spelling (owner/name), and set HF_TOKEN if it is private.")
        return ModelNotFoundError(f"{self.host} refused '{of}' (it answered {code}): try again later, or name a mirror "
                                  "in HF_ENDPOINT.")


def offline() -> bool:
    """Whether the user wants the hub left alone."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


class Tries:
    """When to try again, and when no more."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep
        self._failed = 0

    def worked(self) -> None:
        """Something came: what fails next is the first failure again."""
        self._failed = 0

    def failed(self, problem: Broken, what: str) -> None:
        """Waits, or raises."""
        self._failed += 1
        if self._failed >= MOST_TRIES:
            raise ModelNotFoundError(f"{what}, {MOST_TRIES} times in a row ({problem}): try again later; what is here "
                                     "already is kept.") from None
        wait = problem.wait_s if problem.wait_s is not None else 2.0 ** (self._failed - 1)
        if wait > LONGEST_WAIT_S:
            raise ModelNotFoundError(f"{what} ({problem}, and asks to be left alone for {wait:.0f} s): try again then; "
                                     "what is here already is kept.") from None
        self._sleep(wait)


def read(reply: http.client.HTTPResponse, most: int) -> bytes:
    """Some bytes of an answer; Broken where the connection is."""
    try:
        return reply.read(most)
    except (*_FAULTS, ValueError) as problem:
        raise Broken(str(problem) or type(problem).__name__) from None


def _all(reply: http.client.HTTPResponse) -> bytes:
    parts, size = [], 0
    while chunk := read(reply, 1 << 20):
        parts.append(chunk)
        size += len(chunk)
        if size > MOST_JSON_BYTES:
            raise ModelNotFoundError(f"The hub answered with more than {MOST_JSON_BYTES >> 20} MB where a list of "
                                     "files was asked for: check HF_ENDPOINT.")
    if reply.length:  # urllib takes a connection that broke off for the end
        raise Broken("the connection broke off")
    return b"".join(parts)


def _is_web_address(text: str) -> bool:
    try:
        place = urlsplit(text)
        return place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _further(url: str, location: str | None, of: str) -> str:
    """Where a redirect leads. From an encrypted address to a plain one, or to what is no web address, nowhere."""
    there = urljoin(url, location or "")
    safe = _is_web_address(there) and (urlsplit(url).scheme, urlsplit(there).scheme) != ("https", "http")
    if not location or not safe:
        raise ModelNotFoundError(f"The hub sends whoever asks for '{of}' to an address that is not safe to follow: "
                                 "check HF_ENDPOINT.")
    return there


def _wait(given: str | None) -> float | None:
    """Seconds, of a Retry-After header in either of its forms."""
    if not given:
        return None
    try:
        if given.strip().isdigit():
            return float(given)
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _next(link: str | None, url: str) -> str | None:
    """The address of the next page, of a Link header."""
    for part in (link or "").split(","):
        address, _, about = part.partition(";")
        if 'rel="next"' in about:
            return urljoin(url, address.strip().strip("<>"))
    return None
