"""Messages of rank 0 about the beginning and the end of a training.

They are messages of level INFO of the standard logger ``zeroshard``. If the program has set up no
logging, they are written to standard error, as warnings are.
``logging.getLogger("zeroshard").setLevel(logging.WARNING)`` silences them.
"""

from __future__ import annotations

import contextlib
import logging
import sys

_LOGGER = logging.getLogger("zeroshard")


def is_shown() -> bool:
    """Returns whether a message is shown."""
    if _is_set_up():
        return _LOGGER.isEnabledFor(logging.INFO)
    return not _LOGGER.disabled and _LOGGER.level <= logging.INFO


def log(message: str, *values: object) -> None:
    """Logs a message with ``%`` placeholders for values."""
    if _is_set_up():
        _LOGGER.info(message, *values)
    elif is_shown():
        # Standard error may be closed. In one piece: the ranks share it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"zeroshard: {message % values}\n")
            sys.stderr.flush()


def _is_set_up() -> bool:
    return bool(_LOGGER.handlers or (_LOGGER.propagate and logging.getLogger().handlers))


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
