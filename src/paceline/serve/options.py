"""What an operator may set about the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.request import POOLINGS
from paceline.serve.limits import PRIORITIES, ClientLimits
from paceline.serve.quotas import UNLIMITED, Quota
from paceline.serve.tool_formats import FORMATS

TOOL_PARSERS = ("auto", *FORMATS)
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ClientLimits):
    """Limits are refused with an error that says which; none of them cuts a request silently."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "smollm2-135m"
    """What clients call the model."""
    api_keys: tuple[str, ...] = ()
    """Those of clients. Without any key everybody who reaches the port may use it."""
    operator_keys: tuple[str, ...] = ()
    """These may do all that clients may, and see what the engine does for all: metrics, everybody's requests. Without
    any, a key that is the only one may."""
    quota: Quota = UNLIMITED
    """What each key may use; without keys, all together."""
    key_quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Of keys that have one of their own."""
    share_cache: bool = False
    """Keys share caches and what drafters remember; else each key has its own."""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which a server may be called that checks them; see paceline.serve.hosts."""
    max_body_bytes: int | None = None
    """None: what the context can need, see body_limit()."""
    max_connections: int = 512
    stall_s: float = 60.0
    """How long a client may leave unread what it asked for."""
    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    page: bool = True
    """The page at / and what it shows: recent requests, texts included, to the key that sent them and to operators."""
    pooling: str = "mean"
    """What embeddings are made of: the mean of a text's hidden states, or those of its last token."""
    stored_responses: int = 256
    """Of /v1/responses, for who comes back to them: so many of each key; 0: none."""
    stored_bytes: int = 16_000_000
    """And so many bytes of them."""
    lenient: bool = False
    """Fields of requests that are unknown here are dropped, and the answer says so; else they are refused."""
    trust_request_chat_template: bool = False
    """Requests may bring chat templates of their own, which are programs: they run in a sandbox, within limits."""
    tool_parser: str = "auto"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if self.max_priority is None:
            object.__setattr__(self, "max_priority", PRIORITIES if len(set(self.keys)) < 2 else 0)
        super().__post_init__()
        if self.tool_parser not in TOOL_PARSERS:
            raise ConfigError(f"tool_parser must be one of {', '.join(TOOL_PARSERS)}, got {self.tool_parser!r}.")
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}.")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format must be text or json, got {self.log_format!r}.")
        if any(not key or not key.isascii() or not key.isprintable() or key != key.strip() for key in self.keys):
            raise ConfigError("An API key is empty, begins or ends with a space, or has characters that do not fit a "
                              "header: choose printable ASCII.")
        if any(not host or not host.isascii() or not host.isprintable() or "/" in host for host in self.allowed_hosts):
            raise ConfigError("An allowed host is empty or no name: give it like box.example or 10.0.0.5.")
        if not self.stall_s > 0:
            raise ConfigError(f"stall_s must be above 0, got {self.stall_s}.")
        for name in ("max_body_bytes", "max_connections"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("stored_responses", "stored_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s must be at least 0, got {self.drain_s}.")

    def body_limit(self, max_model_len: int | None) -> int:
        """The largest body, in bytes. Whoever reads one keeps everybody waiting, so it is not larger than a context
        needs: 64 bytes for each of its tokens, and a megabyte for all else, up to 8. None: nobody knows the context
        yet."""
        return self.max_body_bytes or (8_000_000 if max_model_len is None else min(1_000_000 + 64 * max_model_len,
                                                                                   8_000_000))

    @property
    def keys(self) -> tuple[str, ...]:
        """All that are let in; none: everybody is."""
        return (*self.api_keys, *self.operator_keys)
