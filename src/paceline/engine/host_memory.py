"""HostMemory: the host's memory for blocks of the cache, got when it is first needed, and what copying there takes."""

from __future__ import annotations

import logging
from typing import Any

from paceline.cache.host import HostLimits
from paceline.cache.host_storage import HostStorage
from paceline.cache.manager import CacheManager
from paceline.cache.storage import KVStorage
from paceline.cache.transfers import Route
from paceline.config import GIB, EngineConfig
from paceline.engine.schedule.preemption import Preemption

log = logging.getLogger("paceline.engine")


class HostMemory:
    """Serves the CacheManager that is given its `limits`; the copies that manager orders are then possible."""

    def __init__(self, storage: KVStorage, config: EngineConfig) -> None:
        self._storage = storage
        self.limits = HostLimits(config.swap_blocks, config.cold_blocks, self._to_swap, self._to_offload)
        self.preemption = Preemption(config.preemption, storage.block_bytes)

    def _to_swap(self) -> bool:
        otherwise = "preempted requests are computed again"
        host = self._allocate(self.limits.swap_blocks, otherwise)
        if host is None:
            return False
        try:
            rates = host.measure()
        except (MemoryError, RuntimeError) as problem:  # a card is full when somebody is preempted
            log.warning("copies to host memory cannot be tried (%s): %s", str(problem).partition("\n")[0], otherwise)
            return False
        self._storage.add_host((Route.SWAP_OUT, Route.SWAP_IN), host)
        self.preemption.observe_copies(rates.out, rates.back)
        log.debug("host memory to swap to: %.2f GiB, %.1f GB/s out, %.1f GB/s back", host.bytes / GIB, rates.out / 1e9,
                  rates.back / 1e9)
        return True

    def _to_offload(self) -> bool:
        host = self._allocate(self.limits.cold_blocks, "blocks that the prefix cache has no room for are forgotten")
        if host is not None:
            self._storage.add_host((Route.OFFLOAD, Route.FETCH), host)
        return host is not None

    def _allocate(self, blocks: int, otherwise: str) -> HostStorage | None:
        storage = self._storage
        try:
            return HostStorage(storage.planes, storage.block_size, blocks + 1, storage.device)
        except (MemoryError, RuntimeError) as problem:  # the latter is what torch raises
            log.warning("no host memory for %d cache blocks of %d bytes (%s): %s", blocks, sum(storage.block_bytes),
                        str(problem).partition("\n")[0], otherwise)
            return None


def host_report(cache: CacheManager) -> dict[str, Any]:
    """What the host's memory holds of the cache, in blocks, and what was copied there and back."""
    usage, swap, cold = cache.usage(), cache.swap, cache.cold
    total = usage.swap_total + usage.cold_total
    return {"swapped": swap.sequences, "swap_blocks": usage.swap_total, "swap_blocks_used": usage.swap_used,
            "swap_blocks_out": swap.blocks_out, "swap_blocks_in": swap.blocks_in,
            "host_cache_blocks": usage.cold_total, "host_cache_blocks_used": usage.cold_used,
            "host_cache_blocks_out": cold.blocks_out, "host_cache_blocks_in": cold.blocks_in,
            "host_use": (usage.swap_used + usage.cold_used) / total if total else 0.0}
