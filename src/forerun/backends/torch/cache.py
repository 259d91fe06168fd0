"""Keys and values of many sequences: one tensor a layer, one slot a sequence.

A slot's rows 0 … length - 1 are live. Capacity is the same for all slots and grows geometrically; only live rows are
copied then, and pages that were never written cost no memory on a CPU. Attention reads whole blocks of BLOCK rows, so
rows between `length` and the end of a block must be finite: `clear_rows` sees to that once per block.

Shapes: S slots, K key/value heads, P capacity in positions, C head dimension.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 64  # positions; the live length that attention sees is rounded up to it
_FIRST_CAPACITY = 512  # positions; capacities are powers of two, so that what attention sees never ends past one


class SlotCache:
    """The cache tensors and the ledger of slots."""

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self.num_slots = self.capacity = 0
        self.layers_2SKPC = [self._empty(0, 0) for _ in range(num_layers)]
        self._length: dict[int, int] = {}  # of each slot in use
        self._finite: list[int] = []  # of each slot: rows 0 … n - 1 hold finite numbers
        self._free: list[int] = []  # heap

    def _empty(self, num_slots: int, capacity: int) -> Tensor:
        shape = (2, num_slots, self._num_kv_heads, capacity, self._head_dim)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def open(self) -> int:
        """Take the lowest free slot, empty."""
        if not self._free:
            self._resize(max(1, 2 * self.num_slots), self.capacity)
        slot = heapq.heappop(self._free)
        self._length[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. When none is in use the memory goes back as well."""
        del self._length[slot]
        heapq.heappush(self._free, slot)
        if not self._length:
            self._free, self._finite = [], []
            self._resize(0, 0)

    def length(self, slot: int) -> int:
        """Return how many rows of `slot` are live."""
        return self._length[slot]

    def set_length(self, slot: int, length: int) -> None:
        """Declare rows 0 … length - 1 of `slot` live; they have room (see `reserve`)."""
        assert 0 <= length <= self.capacity
        self._length[slot] = length

    def gather(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Declare live: the first `length` rows of `slot`, then those of `path`, which count from there."""
        if list(path) != list(range(len(path))):
            rows = torch.tensor([length + row for row in path], device=self._device)
            for layer in self.layers_2SKPC:
                layer[:, slot, :, length : length + len(path)] = layer[:, slot].index_select(2, rows)
        self.set_length(slot, length + len(path))

    @property
    def num_positions(self) -> int:
        """How many rows are live, over all slots."""
        return sum(self._length.values())

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` rows in each slot."""
        if capacity > self.capacity:
            self._resize(self.num_slots, max(_FIRST_CAPACITY, 1 << (capacity - 1).bit_length()))

    def clear_rows(self, first_slot: int, end_slot: int, end: int) -> None:
        """Make rows 0 … end - 1 of slots first_slot … end_slot - 1 finite where they aren't yet."""
        for slot in range(first_slot, end_slot):
            begin = self._finite[slot]
            if begin < end:
                for layer in self.layers_2SKPC:
                    layer[:, slot, :, begin:end].zero_()
                self._finite[slot] = end

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` rows of one slot to another and declare them live there."""
        for layer in self.layers_2SKPC:
            layer[:, target, :, :length] = layer[:, source, :, :length]
        self._finite[target] = max(self._finite[target], length)
        self.set_length(target, length)

    def _resize(self, num_slots: int, capacity: int) -> None:
        for index, old in enumerate(self.layers_2SKPC):
            new = self.layers_2SKPC[index] = self._empty(num_slots, capacity)
            for slot, length in self._length.items():
                new[:, slot, :, :length] = old[:, slot, :, :length]
        for slot in range(self.num_slots, num_slots):
            heapq.heappush(self._free, slot)
        self._finite = [self._length.get(slot, 0) for slot in range(num_slots)]
        self.num_slots, self.capacity = num_slots, capacity
