"""What owns one thing that a copy could not own as well: an engine, threads, a process."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from engine.errors import UsageError


class Handle:
    """Not to be copied or pickled: two handles would both end the one thing that is behind them."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Where copy, deepcopy and pickle all come by; UsageError."""
        raise UsageError(
            f"a {type(self).__name__} cannot be copied or pickled: two would end what is one; "
            "make another"
        )
