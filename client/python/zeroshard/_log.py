"""The logger ``zeroshard``, on which rank 0 reports the beginning and the end of a training.

Its messages have level INFO. They go to the handlers of the program. If it has none, they go to
standard error, as the warnings of a program without handlers do. ``logging.getLogger("zeroshard")
.setLevel(logging.WARNING)`` silences them.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("zeroshard")


class _Fallback(logging.Handler):
    """Writes to standard error, unless the program has a handler that gets the record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        others = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else [])]
        if any(handler is not self for handler in others):
            return
        try:
            # In one piece: the ranks share standard error.
            sys.stderr.write(f"zeroshard: {record.getMessage()}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)
LOGGER.addHandler(_Fallback())


def bytes_text(count: float) -> str:
    """A number of bytes for people, such as ``1.24 GB``."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def steps_text(count: int) -> str:
    """A number of steps, such as ``1 step``."""
    return f"{count:,} step{'' if count == 1 else 's'}"


def numel_text(count: int) -> str:
    """A number of elements for people, such as ``30.1 M``."""
    if count < 100_000:
        return f"{count:,}"
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
