"""DeviceKernels: what a backend offers beside Kernels so that whole steps run on a device, the next one launched before
the host has read what the last one sampled.

Everything a step reads and writes lies in tensors that the engine keeps, of sizes fixed when the step is captured; rows
beyond a step's own are padding. Nothing here waits for the device or reads from it, so all of it can be captured. One
stream at a time.

A token that the host does not know yet is pending: it is negative, and stands for the newest one of its seat, which the
step that samples it leaves at the end of SeatTables.texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.device.head_rounds import HeadRounds
from paceline.kernels.device.operands import Controls, PackedDrafts, SampledRows, Verdicts
from paceline.kernels.device.repeats import Drafts, RepeatInputs, RepeatRows
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.operands import Heads


class Sampler(Protocol):
    """From logits to tokens for the requests seated in some SeatTables. A row's answer is bitwise the same in any
    company, and the token is the one that sampling.Pipeline gives."""

    def prepare(self, controls: Controls) -> None:
        """Allocate what these controls need. To be called before a graph with them is captured."""
        ...

    def sample(self, logits: Tensor, rows: SampledRows, controls: Controls) -> Tensor:
        """[R] int32, overwritten by the next call: one token per row of raw logits [R, V] (float32, bfloat16 or
        float16; read, never written); columns.EMPTY where no token is above -inf and for padding, NAN."""
        ...

    def several(self, logits: Tensor, rows: SampledRows, controls: Controls) -> tuple[Tensor, Tensor]:
        """As `sample`, then `controls.further` times what would have been sampled without those before it: tokens
        [1 + further, R], and the `logprobs` of each [1 + further, R, ...]. Tensors of their own."""
        ...

    def logprobs(self, logits: Tensor, rows: SampledRows, sampled: Tensor, controls: Controls) -> Tensor:
        """Scores of the tokens just sampled from the same logits with the same controls (logprobs set): a tensor of its
        own, [R, 3 + 2 n] int32, for n alternatives: the bits of the raw and the processed log-probability (float32; NaN
        without a token), the rank (1: the best raw; 0 without a token), the n best tokens (-1: there are fewer), the
        bits of their raw log-probabilities. Those of padding mean nothing."""
        ...


class Verifier(Protocol):
    """The coupled rule for all groups of a step: a draft stands while the target's own token is among the children."""

    def verify(self, drafts: PackedDrafts, sampled: Tensor, tables: SeatTables, *, count: bool = False) -> Verdicts:
        """`sampled` [R]: the target's token after each row (negative: none). What is emitted goes to the end of the
        seats' texts. `count`: it counts in what penalised seats sample from now on. The next call overwrites the
        verdicts."""
        ...


class Compaction(Protocol):
    """Moves the KV of accepted rows within the planes of one cache group: a tree's was written row by row, and is read
    by depth."""

    def move(self, offsets: Tensor, accepted: Tensor, rows: Tensor, slots: Tensor) -> None:
        """The d-th accepted row of each group goes to the slot of the group's d-th row.

        offsets [G + 1] as in PackedDrafts; accepted [G] and rows [G, room] as in Verdicts; slots [R]: where the KV of
        each row was written, in the order of the rows (int32 or int64).
        """
        ...


class DeviceDrafter(Protocol):
    """Drafts as a part of every time of a repeated step, without the host: looked up in a text (DeviceKernels), or by
    whatever else can be captured."""

    def propose(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        """A draft for every group whose seat wants one (columns.LOOKUP); no longer than that says, nor beyond the
        group's end. Written: all of `drafts` but what is taken."""
        ...


class DeviceKernels(Protocol):
    """Goes with the Kernels whose `device` it is: those read the DeviceRows that are shaped and filled here."""

    def decode_shape(self, rows: int) -> RowsShape:
        """Room for steps of up to `rows` rows, one per group."""
        ...

    def prefill_shape(self, rows: int, groups: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        """Room for steps of up to `rows` rows in up to `groups` chains of any length."""
        ...

    def verify_shape(self, rows: int, groups: int, depth: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        """Room for steps of up to `rows` rows in up to `groups` groups, chains and trees of paths of up to `depth` rows
        (0: chains only)."""
        ...

    def scratch(self, shape: RowsShape, longest: int, heads: Heads, dtype: torch.dtype) -> int:
        """Bytes that attention takes beside its operands in such a step, texts of up to `longest` tokens."""
        ...

    def repeat_shape(self, rows: int, groups: int, widest: int, heads: Heads, dtype: torch.dtype) -> RowsShape:
        """Room for repeated steps with drafts, of up to `rows` rows in up to `groups` chains of up to `widest`."""
        ...

    def begin(self, inputs: RepeatInputs, tables: SeatTables, blocks: Tensor, rows: DeviceRows, out: RepeatRows,
              block_size: int) -> None:
        """The beginning of a time of a repeated step without drafts, one row per group, for one cache group. blocks
        [G or more, B] int32: the groups' blocks. Written: `rows` and `out`."""
        ...

    def propose(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        """Look up a draft for every group in its seat's text, as its columns.LOOKUP says; no longer than
        inputs.levels allows, nor beyond the group's end. Written: all of `drafts` but what is taken."""
        ...

    def spread(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts, blocks: Tensor, rows: DeviceRows,
               out: RepeatRows, block_size: int) -> None:
        """As `begin` for a step with drafts, shaped by repeat_shape: each group's rows lie one after the other. Where
        they do not suffice for all drafts, tokens of the lowest levels get none, and if those of the highest level are
        still too many the longest drafts are cut. Written too: drafts.taken."""
        ...

    def end(self, inputs: RepeatInputs, sampled: Tensor, out: Tensor, tables: SeatTables, *, count: bool) -> None:
        """The end of a time without drafts: the tokens sampled [R] int32 go to out[time] [most repeats, R or more], or
        IDLE, and to the end of their seats' texts. `count`: those of penalised seats are counted."""
        ...

    def record(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts, verdicts: Verdicts, out: Tensor) -> None:
        """The end of a time with drafts, which the verifier has noted: a round per group goes to out[time] [most
        repeats, G or more, ROUND + 1 + most drafts or more] (repeats.ROUND)."""
        ...

    def fill(self, tokens: Tensor, seats: Tensor, tables: SeatTables) -> None:
        """tokens and seats [N] int64: a pending token becomes its seat's newest."""
        ...

    def note(self, sampled: Tensor, seats: Tensor, tables: SeatTables, *, count: bool) -> None:
        """The tokens sampled [R] int32 go to the end of the texts of their seats [R] int32 (-1: padding); `count`:
        those of penalised seats are counted."""
        ...

    def seat(self, packed: Tensor, tables: SeatTables) -> None:
        """packed [n, 2 + COLUMNS] int64: seat, length of its text, the seat's row of the table."""
        ...

    def sampler(self, tables: SeatTables, rows: int) -> Sampler | None:
        """For up to `rows` rows at a time. None: there are no kernels for it, and the host's pipeline samples."""
        ...

    def verifier(self, groups: int, depth: int, device: torch.device) -> Verifier:
        """For up to `groups` groups at a time, and paths of up to `depth` accepted tokens; longer ones are cut short
        there, which costs drafts and changes no token."""
        ...

    def head_rounds(self, groups: int, device: torch.device) -> HeadRounds:
        """For up to `groups` groups at a time."""
        ...

    def compaction(self, planes: Sequence[Tensor]) -> Compaction:
        """`planes`: keys and values of a cache group's layers, and their scales where there are any; contiguous, first
        axis slots. They must stay where they are."""
        ...
