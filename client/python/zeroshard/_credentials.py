"""The credentials that a process presents to a cluster."""

from __future__ import annotations

import os
import pathlib

from .errors import InvalidArgumentError


def token_of(given: str | None) -> str | None:
    """The token: ``given``, or else that of ``ZEROSHARD_TOKEN`` or of the file
    ``ZEROSHARD_TOKEN_FILE``. None if there is none.

    Raises:
        InvalidArgumentError: both variables are set, or the file cannot be read or is empty.
    """
    token, file = os.environ.get("ZEROSHARD_TOKEN"), os.environ.get("ZEROSHARD_TOKEN_FILE")
    if given or not file:
        return given or token or None
    if token:
        raise InvalidArgumentError(
            "ZEROSHARD_TOKEN and ZEROSHARD_TOKEN_FILE are set; set one of the two"
        )
    try:
        text = pathlib.Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        raise InvalidArgumentError(
            f"the token file {file} of ZEROSHARD_TOKEN_FILE cannot be read: {error}"
        ) from None
    if not text:
        raise InvalidArgumentError(f"the token file {file} of ZEROSHARD_TOKEN_FILE is empty")
    return text
