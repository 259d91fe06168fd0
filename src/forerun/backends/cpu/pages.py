"""Which pages of the cache belong to which sequence. Pages are shared between forks and counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class PageStore(Protocol):
    """Where the pages are: the native model, or its numpy twin."""

    def new_page(self) -> int: ...

    def free_page(self, page: int) -> None: ...

    def copy_page(self, source: int, target: int) -> None: ...

    def move_slot(self, pages: np.ndarray, source: int, target: int) -> None: ...


class PageTable:
    """The page list and the length of each sequence. A page that two sequences share is copied before one writes."""

    def __init__(self, store: PageStore, page_size: int) -> None:
        self._store = store
        self._size = page_size
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._next = 0

    def open(self) -> int:
        self._next += 1
        self._pages[self._next], self._lengths[self._next] = [], 0
        return self._next

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    @property
    def num_positions(self) -> int:
        """How many positions are cached, over all sequences; what forks share counts for each."""
        return sum(self._lengths.values())

    def pages(self, seq: int) -> list[int]:
        return self._pages[seq]

    def grow(self, seq: int, count: int) -> None:
        """Make room for `count` more positions, which are about to be written."""
        pages, length = self._pages[seq], self._lengths[seq]
        if length % self._size and self._users[pages[-1]] > 1:
            own = self._new()
            self._store.copy_page(pages[-1], own)
            self._drop(pages[-1])
            pages[-1] = own
        while len(pages) * self._size < length + count:
            pages.append(self._new())
        self._lengths[seq] = length + count

    def keep(self, seq: int, length: int, path: Sequence[int] = ()) -> None:
        """Keep the positions below `length`, then those of `path`, which count from there."""
        pages = self._pages[seq]
        moves = [(length + row, length + at) for at, row in enumerate(path) if row != at]
        if moves:
            pages_P = np.asarray(pages, dtype=np.int64)
            for source, target in moves:
                self._store.move_slot(pages_P, source, target)
        length += len(path)
        needed = -(-length // self._size)
        for page in pages[needed:]:
            self._drop(page)
        del pages[needed:]
        self._lengths[seq] = length

    def fork(self, seq: int, length: int) -> int:
        child = self.open()
        self._pages[child] = self._pages[seq][: -(-length // self._size)]
        self._users.update(self._pages[child])
        self._lengths[child] = length
        return child

    def release(self, seq: int) -> None:
        self.keep(seq, 0)
        del self._pages[seq], self._lengths[seq]

    def _new(self) -> int:
        page = self._store.new_page()
        self._users[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            self._store.free_page(page)
