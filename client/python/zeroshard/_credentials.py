"""The credentials that a process presents to a cluster."""

from __future__ import annotations

import os
import pathlib

from .errors import InvalidArgumentError


def tls_files() -> tuple[str, str | None, str | None, str | None] | None:
    """The TLS files from the environment: ``ZEROSHARD_TLS_CA`` names the authorities of the
    cluster, the optional ``ZEROSHARD_TLS_CERT`` and ``ZEROSHARD_TLS_KEY`` name the certificate
    of this process and its key, and the optional ``ZEROSHARD_TLS_CRL`` names revocation lists.
    Returns None if connections are not encrypted.

    Raises:
        InvalidArgumentError: one of the other files is set, but the authorities are not.
    """
    ca, certificate, key, crl = (
        os.environ.get(f"ZEROSHARD_TLS_{name}") or None for name in ("CA", "CERT", "KEY", "CRL")
    )
    if ca is not None:
        return ca, certificate, key, crl
    if certificate is not None or key is not None or crl is not None:
        raise InvalidArgumentError(
            "ZEROSHARD_TLS_CERT, ZEROSHARD_TLS_KEY and ZEROSHARD_TLS_CRL need ZEROSHARD_TLS_CA, "
            "the file with the certificates of the authorities of the cluster"
        )
    return None


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
