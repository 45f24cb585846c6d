"""What a cluster is started with."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

from paceline.cluster.routing import POLICIES
from paceline.cluster.transfer.chosen import AUTO, check_transport
from paceline.errors import ConfigError
from paceline.serve.hosts import is_loopback


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    replicas: int | None = None
    """That do everything; None: one, unless prompts are computed apart."""
    prefill_replicas: int | None = None
    """That compute prompts for `decode_replicas`; both or neither."""
    decode_replicas: int | None = None
    transfer: str = AUTO
    """How blocks get from the former to the latter: a transport, or auto."""
    ray: str | None = None
    """An address of a Ray cluster; None: one is started on this machine, and stopped again."""
    routing: str = "prefix"
    autoscale: tuple[int, int] | None = None
    """(fewest, most) replicas."""
    threads: int | None = None
    """Of each rank of each replica; None: the machine's cores, shared out."""
    prefill_threads: int | None = None
    """Of each prefill replica; None: as `threads`."""
    ranks: int = 1
    """Processes that hold a replica's model together (tensor parallel)."""
    name: str = field(default_factory=lambda: f"paceline-{secrets.token_hex(4)}")
    """Of the Serve application: several may share a cluster."""
    drain_s: float = 30.0
    """How long a replica that leaves may take."""
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """By which its workers know each other."""

    def __post_init__(self) -> None:
        for name in ("replicas", "prefill_replicas", "decode_replicas", "threads", "prefill_threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.routing not in POLICIES:
            raise ConfigError(f"routing must be one of {', '.join(POLICIES)}, got {self.routing!r}.")
        check_transport(self.transfer)
        if (self.prefill_replicas is None) != (self.decode_replicas is None):
            raise ConfigError("prefill_replicas and decode_replicas go together: give both, or replicas alone.")
        if not self.apart:
            if self.prefill_threads is not None:
                raise ConfigError("prefill_threads is for prefill_replicas: replicas that do everything have threads.")
            return
        if self.replicas is not None:
            raise ConfigError("Replicas do everything, or some prefill and some decode: give replicas, or "
                              "prefill_replicas and decode_replicas.")
        if self.autoscale is not None:
            raise ConfigError("autoscale is for replicas that do everything: leave it out, or prefill_replicas and "
                              "decode_replicas.")
        if self.ranks > 1:
            raise ConfigError("A cache that several ranks hold together is not handed over: leave "
                              "tensor_parallel_size out, or use replicas in place of prefill_replicas and "
                              "decode_replicas.")

    @property
    def apart(self) -> bool:
        """Whether some compute prompts for others."""
        return self.prefill_replicas is not None

    @property
    def beyond(self) -> bool:
        """Whether replicas may be on other machines."""
        return self.ray is not None and not is_loopback(self.ray.rpartition(":")[0])

    @property
    def serving(self) -> int:
        """Replicas that carry out orders, at the start."""
        return self.decode_replicas or self.replicas or 1

    @property
    def threads_each(self) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // (self.most * self.ranks))

    @property
    def prefill_threads_each(self) -> int:
        return self.prefill_threads or self.threads_each

    @property
    def cores(self) -> int:
        """That all of them take."""
        prefill = self.prefill_replicas or 0
        return self.threads_each * self.ranks * (self.most - prefill) + self.prefill_threads_each * prefill

    @property
    def most(self) -> int:
        """Replicas that there may be, of all kinds."""
        return (self.prefill_replicas or 0) + self.serving if self.autoscale is None else self.autoscale[1]


def read_autoscale(text: str | None) -> tuple[int, int] | None:
    """MIN:MAX as the command line has it."""
    if text is None:
        return None
    fewest, colon, most = text.partition(":")
    if not colon or not fewest.isdigit() or not most.isdigit() or not 1 <= int(fewest) <= int(most):
        raise ConfigError(f"autoscale must be MIN:MAX with 1 <= MIN <= MAX, such as 1:4, got {text!r}.")
    return int(fewest), int(most)
