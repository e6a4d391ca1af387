"""The error for an integration whose library is not installed."""

from __future__ import annotations


def missing(package: str, error: ImportError) -> ImportError:
    """The error of ``zeroshard.integrations.<package>`` if the package cannot be imported."""
    return ImportError(
        f"zeroshard.integrations.{package} needs the package {package!r}, which cannot be imported "
        f"({error}); install it with: pip install {package}"
    )
