"""Who sees whom: the causal and sliding-window rule, as a mask and as ranges of indices."""

from typing import NamedTuple

import torch
from torch import Tensor


class Mask(NamedTuple):
    """Query i sees key j always, or when causal: i + offset - window < j <= i + offset.

    Attributes:
        causal: later keys are hidden.
        window: keys a query sees at most, None for no limit.
        offset: T - S for "bottom-right" alignment, 0 for "top-left".
    """

    causal: bool
    window: int | None
    offset: int

    def visible(
        self,
        queries: int,
        keys: int,
        *,
        device: torch.device | None = None,
        first_query: int = 0,
        first_key: int = 0,
    ) -> Tensor:
        """Boolean [queries, keys], True where the query sees the key.

        `first_query` and `first_key` place a tile inside the whole matrix.
        """
        if not self.causal:
            return torch.ones(queries, keys, dtype=torch.bool, device=device)
        last_seen = torch.arange(first_query, first_query + queries, device=device)[:, None] + self.offset
        key = torch.arange(first_key, first_key + keys, device=device)[None, :]
        seen = key <= last_seen
        if self.window is not None:
            seen = seen & (key > last_seen - self.window)
        return seen

    def visible_keys(self, first_query: int, last_query: int, keys: int) -> tuple[int, int]:
        """Half-open range of the keys some query of first_query..last_query sees; (0, 0) for none."""
        if not self.causal:
            return 0, keys
        start = 0 if self.window is None else max(0, first_query + self.offset - self.window + 1)
        stop = min(keys, last_query + self.offset + 1)
        return (start, stop) if start < stop else (0, 0)

    def all_visible(self, first_query: int, last_query: int, first_key: int, last_key: int) -> bool:
        """True when every query of the tile sees every key of it."""
        if not self.causal:
            return True
        in_window = self.window is None or first_key > last_query + self.offset - self.window
        return in_window and last_key <= first_query + self.offset

    def some_query_sees_nothing(self, queries: int, keys: int) -> bool:
        """True when all keys come after the first query, or the last query's window starts after all keys."""
        if not self.causal:
            return False
        return self.offset < 0 or (self.window is not None and queries + self.offset - self.window >= keys)
