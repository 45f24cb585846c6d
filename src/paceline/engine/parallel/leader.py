"""Leader: rank 0's share of a model, as the whole model: whatever it is asked, all ranks do."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import Protocol, TypeVar, cast

import torch

from paceline.cache.host_storage import HostStorage
from paceline.cache.storage import KVStorage
from paceline.cache.transfers import BlockCopy, Route, SlotMove
from paceline.engine.parallel.calls import (
    AddHost,
    Allocate,
    Apply,
    Call,
    Described,
    Embed,
    FreeAdapter,
    Layers,
    LoadAdapter,
    Logits,
    Pass,
    Whole,
    WholeHead,
    described,
    send,
)
from paceline.errors import ConfigError, ParallelError
from paceline.kernels.adapted import slots_of
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Norm
from paceline.models.decoder import Decoder
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM, ModelTraits
from paceline.models.layers import Linear
from paceline.models.load.adapters import PeftAdapter
from paceline.parallel.communicator import Communicator

Found = TypeVar("Found")


class Followers(Protocol):
    """The other ranks, as rank 0 reaches them."""

    @property
    def ranks(self) -> Communicator:
        """Rank 0's end."""
        ...

    def tell(self, call: Call, tensors: Described) -> None:
        """Have them make a call; its tensors follow by `ranks`. Raises where one is known to be gone."""
        ...

    @property
    def gone(self) -> str | None:
        """What is known of a rank that has ended, as a sentence; None: nothing."""
        ...

    def why(self) -> str | None:
        """The same, after an exchange has failed: it may take a moment until more is known."""
        ...

    def close(self) -> None:
        """They end. May be called again."""
        ...


class Leader(ModelTraits):
    """Implements CausalLM. Ranks that are out of step cannot be brought back, so after any failure in the middle of a
    call it is `lost`: every further call says so at once."""

    capturable = False

    def __init__(self, model: CausalLM, followers: Followers) -> None:
        """`model`: rank 0's share."""
        self.share = model
        self._lost: ParallelError | None = None
        self._followers = followers
        self._storage: KVStorage | None = None
        self.config, self.cache_groups = model.config, model.cache_groups
        self.bits, self.kv_dtype, self.quantization = model.bits, model.kv_dtype, model.quantization
        self.built_for, self.skips_sublayers = model.built_for, model.skips_sublayers
        weakref.finalize(self, followers.close)

    @property
    def lost(self) -> ParallelError | None:  # type: ignore[override]
        if self._lost is None and self._followers.gone is not None:
            self._lost = ParallelError(self._followers.gone)
        return self._lost

    def close(self) -> None:
        """The other ranks end."""
        self._lost = self.lost or ParallelError("This engine was closed: make another one.")
        self._followers.close()

    @property
    def size(self) -> int:
        """Ranks."""
        return self._followers.ranks.size

    def linears(self) -> list[Linear]:
        """Of rank 0's share; what else has to be done with an adapter: load_adapter."""
        return self.share.linears()

    def load_adapter(self, name: str, adapter: PeftAdapter, slot: int) -> None:
        """Rank 0 has loaded its part of it."""
        self._call(LoadAdapter(name, adapter, slot), (), lambda: None)

    def free_adapter(self, slot: int) -> None:
        self._call(FreeAdapter(slot), (), lambda: None)

    # What a trained head borrows (models.heads.target.Target). It runs on rank 0 alone, which has all of the stream.

    @property
    def norm(self) -> Norm:
        return cast(Decoder, self.share).norm

    @cached_property
    def head(self) -> Linear:
        """The whole one, brought together when it is first asked for: rank 0 holds it from then on."""
        model = cast(Decoder, self.share)
        return Linear(self._call(WholeHead(), (), model.whole_head))

    def keep(self, storage: KVStorage) -> None:
        """The cache that this model runs over from now on: what becomes of it here becomes of the others' shares."""
        self._storage = storage
        blocks = [planes[0].shape[0] // storage.block_size for planes in storage.planes]
        self._call(Allocate(blocks, storage.block_size, storage.dtype), (), lambda: None)
        storage.mirror = self

    def apply(self, moves: Sequence[SlotMove], copies: Sequence[BlockCopy]) -> None:
        self._call(Apply(moves, copies), (), lambda: None)

    def add_host(self, routes: Sequence[Route], host: HostStorage) -> None:
        self._call(AddHost(routes, host.num_blocks), (), lambda: None)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._call(Embed(), [token_ids], lambda: self.share.embed(token_ids))

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        slots = slots_of(kernels)
        return self._call(Logits(), [hidden] if slots is None else [hidden, slots],
                          lambda: self.share.logits(hidden, kernels))

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        run, tensors = self._pass(context)
        return self._call(Whole(run), [token_ids, *tensors], lambda: self.share.forward(token_ids, context))

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        run, tensors = self._pass(context)
        return self._call(Layers(run, first, last), [hidden, *tensors],
                          lambda: self.share.layers(hidden, context, first, last))

    def _pass(self, context: Forward) -> tuple[Pass, list[torch.Tensor]]:
        if self._storage is None or context.keys is not self._storage.keys:
            raise ConfigError("A model that several ranks hold together (tensor_parallel_size) runs over its engine's "
                              "cache alone.")
        return Pass.of(context)

    def _call(self, call: Call, tensors: Sequence[torch.Tensor], own: Callable[[], Found]) -> Found:
        if self.lost is not None:
            raise ParallelError(self.lost.told)
        with uninterrupted():
            try:
                self._followers.tell(call, described(tensors))
                send(self._followers.ranks, tensors)
                return own()
            except BaseException as problem:  # interrupted too: the ranks are out of step from here on
                known = self._followers.why()
                lost = self._lost = ParallelError(known) if known is not None else ParallelError(
                    "A step broke in the middle of what the ranks of this model compute together, and they cannot go "
                    "on: make the engine anew.", problem)
                self._followers.close()
                if not isinstance(problem, Exception):
                    raise
                raise lost from problem


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until all ranks have made a call, so that they can make the next one; a second one does not."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(came) == 1:
        before(*came[0])
