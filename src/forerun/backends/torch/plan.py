"""What a pass does with its rows, worked out once on the host: positions, cache rows, attention calls, masks.

Rows of neighbouring slots go through one attention call over a view of the cache, if that costs less than calls of
their own; slots and rows that are only in between are computed and dropped. The query heads that share a key head are
folded into the row dimension, so keys and values are never repeated.

Two rules keep a row's result independent of how many rows go with it, to the bit on a CPU: the number of keys that
attention sees is one of those of `attended_len`, the keys too many masked, and a call has at least _MIN_FOLDED_ROWS
folded rows.

Shapes: N rows of the pass, S slots of a call, M rows a slot in a call, Q query heads, K key heads, G = Q / K,
R folded rows: at least M·G, L keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.backends.base import depths, lineage
from forerun.backends.torch.cache import BLOCK
from forerun.models.config import DecoderConfig

_MIN_FOLDED_ROWS = 8
_MAX_ROWS = 256  # a longer piece of prompt is attended to in calls of so many rows, each with the keys that it sees
_CALL_COST = 2048  # of an attention call, in rows × keys
_KERNEL_KEYS = 512  # keys that the fused kernel takes at a time; those that a window hides are skipped so many at once
_UNSPLIT_KEYS = 384  # of them, those that its matrix product sums in one piece


class Rows(NamedTuple):
    """The new rows of one slot, rows first … of the pass: a chain from position `start` on, or a tree."""

    slot: int
    start: int  # where the first one lies in the cache
    num_rows: int
    first: int
    parents: Sequence[int] | None = None  # of a tree; see Feed

    @property
    def positions(self) -> np.ndarray:
        """Where each row is in its text."""
        if self.parents is None:
            return np.arange(self.start, self.start + self.num_rows)
        return self.start + np.asarray(depths(self.parents))


@dataclass(frozen=True)
class Keys:
    """The keys that one attention call sees."""

    begin: int
    end: int
    mask_S1RL: Tensor  # 0 where seen, -inf where not, in the net's dtype


@dataclass(frozen=True)
class Call:
    """One attention call: slots first_slot … end_slot - 1."""

    first_slot: int
    end_slot: int
    num_folded_rows: int
    query_index: Tensor  # (S·K·R,): rows of the flattened heads of the pass
    keys: dict[int | None, Keys]  # by window


@dataclass(frozen=True)
class Plan:
    """A pass."""

    positions_N: Tensor
    end: int  # all positions are below it
    write_index: Tensor  # (N, 2K): rows of a layer's flattened cache
    calls: tuple[Call, ...]
    output_index: Tensor  # (N·Q,): rows of the flattened results of all calls


def make_plan(
    rows: Sequence[Rows],
    config: DecoderConfig,
    *,
    num_slots: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """Plan a pass over `rows`, which lie in the order of the pass. `capacity` is the cache's, in positions."""
    num_rows = sum(item.num_rows for item in rows)
    slots_N = np.repeat([item.slot for item in rows], [item.num_rows for item in rows])
    positions_N = np.concatenate([item.positions for item in rows])
    places_N = np.concatenate([np.arange(item.start, item.start + item.num_rows) for item in rows])
    num_kv_heads = config.num_kv_heads
    planes_2S = np.arange(2)[:, None] * num_slots + slots_N  # (2, N)
    heads = (planes_2S.T[:, :, None] * num_kv_heads + np.arange(num_kv_heads)).reshape(num_rows, -1)

    windows = {layer.window for layer in config.layers}
    output_index = np.empty((num_rows, num_kv_heads, config.num_heads // num_kv_heads), dtype=np.int64)
    calls, offset = [], 0
    for group in group_rows(rows):
        call = _make_call(group, config, windows, output_index, offset, dtype=dtype, device=device)
        offset += len(call.query_index)
        calls.append(call)
    return Plan(
        positions_N=_to(positions_N, device),
        end=int(positions_N.max()) + 1,
        write_index=_to(heads * capacity + places_N[:, None], device),
        calls=tuple(calls),
        output_index=_to(output_index.reshape(-1), device),
    )


def attended_len(length: int) -> int:
    """Return how many keys attention sees when `length` are live: whole blocks, and a sum that more can't reorder.

    The fused kernel takes keys 512 at a time; its matrix product sums up to 384 of them in order, but halves a number
    between 192 and 384. Such a number is raised to 384: keys too many add exact zeros at the end.
    """
    whole, rest = divmod(-(-length // BLOCK) * BLOCK, _KERNEL_KEYS)
    return whole * _KERNEL_KEYS + (_UNSPLIT_KEYS if _UNSPLIT_KEYS // 2 < rest < _UNSPLIT_KEYS else rest)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def group_rows(rows: Sequence[Rows]) -> list[list[Rows]]:
    """Split long pieces, then put neighbouring slots together as long as the sum of costs falls."""
    groups: list[list[Rows]] = []
    for item in sorted(rows):
        longest = _MAX_ROWS if item.parents is None else item.num_rows
        for offset in range(0, item.num_rows, longest):
            count = min(longest, item.num_rows - offset)
            piece = [Rows(item.slot, item.start + offset, count, item.first + offset, item.parents)]
            last = groups[-1] if groups and groups[-1][-1].slot < item.slot else None
            if last is not None and _cost(last + piece) <= _cost(last) + _cost(piece):
                last.extend(piece)
            else:
                groups.append(piece)
    return groups


def _cost(group: Sequence[Rows]) -> int:
    slots = group[-1].slot - group[0].slot + 1
    return _CALL_COST + slots * max(item.num_rows for item in group) * max(item.start + item.num_rows for item in group)


def _make_call(
    group: Sequence[Rows],
    config: DecoderConfig,
    windows: set[int | None],
    output_index: np.ndarray,
    offset: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Call:
    """Build one call and write into `output_index` (N, K, G) where the results of its rows will lie."""
    first_slot, end_slot = group[0].slot, group[-1].slot + 1
    S, M = end_slot - first_slot, max(item.num_rows for item in group)
    K, G = config.num_kv_heads, config.num_heads // config.num_kv_heads
    R = max(M * G, _MIN_FOLDED_ROWS)
    heads_a_row = config.num_heads + 2 * K

    row_SR = np.zeros((S, R), dtype=np.int64)  # row of the pass; that of padding doesn't matter
    group_head_R = np.arange(R) % G
    last_key_SR = np.zeros((S, R), dtype=np.int64)
    trees = []
    for item in group:
        s, count = item.slot - first_slot, item.num_rows
        of_row = np.minimum(np.arange(R) // G, count - 1)
        row_SR[s] = item.first + of_row
        last_key_SR[s] = item.positions[of_row]
        if item.parents is not None:
            trees.append((s, item, of_row))
        folded = np.arange(count)[:, None, None] * G + np.arange(G)  # (count, 1, G)
        output_index[item.first : item.first + count] = offset + (s * K + np.arange(K)[:, None]) * R + folded
    query_SKR = row_SR[:, None] * heads_a_row + np.arange(K)[:, None] * G + group_head_R

    end = attended_len(max(item.start + item.num_rows for item in group))
    last_key = _to(last_key_SR, device)
    first_row = min(item.start for item in group)
    return Call(
        first_slot=first_slot,
        end_slot=end_slot,
        num_folded_rows=R,
        query_index=_to(query_SKR.reshape(-1), device),
        keys={window: _keys(last_key, first_row, end, window, trees, dtype=dtype) for window in windows},
    )


def _keys(
    last_key_SR: Tensor,
    first_row: int,
    end: int,
    window: int | None,
    trees: Sequence[tuple[int, Rows, np.ndarray]],
    *,
    dtype: torch.dtype,
) -> Keys:
    begin = 0 if window is None else max(0, first_row - window + 1) // _KERNEL_KEYS * _KERNEL_KEYS
    keys_L = torch.arange(begin, end, device=last_key_SR.device)
    last_key_SR1 = last_key_SR.unsqueeze(-1)
    hidden_SRL = keys_L > last_key_SR1
    if window is not None:
        hidden_SRL |= keys_L <= last_key_SR1 - window
    for s, item, of_row in trees:
        assert item.parents is not None
        hidden = ~lineage(item.parents)
        if window is not None:
            hidden |= item.positions <= item.positions[:, None] - window
        own = slice(item.start - begin, item.start - begin + item.num_rows)
        hidden_SRL[s, :, own] = _to(hidden[of_row], hidden_SRL.device)
    mask = torch.zeros(hidden_SRL.shape, dtype=dtype, device=hidden_SRL.device)
    return Keys(begin, end, mask.masked_fill_(hidden_SRL, float("-inf")).unsqueeze(1))
