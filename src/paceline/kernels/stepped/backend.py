"""SteppedKernels: the reference backend for steps that lie in DeviceRows. What each op promises is on Kernels."""

from __future__ import annotations

import torch

from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.stepped.device import SteppedDevice
from paceline.kernels.stepped.live import LiveRows


class SteppedKernels(ReferenceKernels):
    """The reference's bits. Rows whose slot is -1 are padding: nothing of theirs is written to a cache, and what they
    return means nothing."""

    name = "stepped"
    device: SteppedDevice

    def __init__(self) -> None:
        self.device = SteppedDevice()

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        live = slots >= 0
        if not live.all():
            slots, k, v = slots[live], k[live], v[live]
        super().store(k_cache, v_cache, slots, k, v, scales)

    def store_keys(self, k_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor) -> None:
        live = slots >= 0
        super().store_keys(k_cache, slots[live], k[live])

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
               scale: float, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
               softcap: float = 0.0) -> torch.Tensor:
        if layout.device is None:
            return super().attend(q, k_cache, v_cache, layout, view, scale, scales, softcap)
        live: LiveRows | None = view.scratch.get("stepped.live")
        if live is None:
            live = view.scratch["stepped.live"] = LiveRows.of(layout.device, layout, view)
        out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[2])
        if live.layout.rows:
            out[live.rows] = super().attend(q[live.rows], k_cache, v_cache, live.layout, live.view, scale, scales,
                                            softcap)
        return out
