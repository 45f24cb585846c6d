"""What a cluster is started with."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

from paceline.cluster.routing import POLICIES
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    replicas: int = 1
    ray: str | None = None
    """An address of a Ray cluster; None: one is started on this machine, and stopped again."""
    routing: str = "prefix"
    autoscale: tuple[int, int] | None = None
    """(fewest, most) replicas."""
    threads: int | None = None
    """Of each replica; None: the machine's cores, shared out."""
    name: str = field(default_factory=lambda: f"paceline-{secrets.token_hex(4)}")
    """Of the Serve application: several may share a cluster."""
    drain_s: float = 30.0
    """How long a replica that leaves may take."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {self.replicas}.")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.threads}.")
        if self.routing not in POLICIES:
            raise ConfigError(f"routing must be one of {', '.join(POLICIES)}, got {self.routing!r}.")

    @property
    def threads_each(self) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // self.most)

    @property
    def most(self) -> int:
        """Replicas that there may be."""
        return self.replicas if self.autoscale is None else self.autoscale[1]


def read_autoscale(text: str | None) -> tuple[int, int] | None:
    """MIN:MAX as the command line has it."""
    if text is None:
        return None
    fewest, colon, most = text.partition(":")
    if not colon or not fewest.isdigit() or not most.isdigit() or not 1 <= int(fewest) <= int(most):
        raise ConfigError(f"autoscale must be MIN:MAX with 1 <= MIN <= MAX, such as 1:4, got {text!r}.")
    return int(fewest), int(most)
