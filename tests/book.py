"""Hooks of mkdocs for the book: the navigation, and scripts that pages would load from elsewhere.

A folder's index.md links its pages, and the navigation has their order. A page that it does not
link is an error, since nobody would find it.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

#: The directory with the npm packages that `tests/run book` has unpacked.
PACKAGES = "ZEROSHARD_BOOK_PACKAGES"
#: The scripts by their paths in the book.
SCRIPTS = {
    "assets/mermaid.min.js": "mermaid/package/dist/mermaid.min.js",
    "assets/iframe-worker.js": "iframe-worker/package/shim/index.js",
}


def pages_of(docs: Path, folder: str) -> list[str]:
    """The pages of a folder and of those below it: index.md, then those that it links."""
    index = folder + "index.md"
    links = re.findall(r"\]\(([^)#:]+\.md)", (docs / index).read_text())
    linked = [posixpath.normpath(folder + link) for link in links]
    there = {str(path.relative_to(docs)) for path in (docs / folder).rglob("*.md")} - {index}
    if missing := there - set(linked):
        raise PluginError(f"{index} links no {', '.join(sorted(missing))}")
    return [index, *dict.fromkeys(path for path in linked if path in there)]


def on_config(config: MkDocsConfig) -> None:
    """Replaces the folders in the navigation by their pages."""
    docs = Path(config.docs_dir)

    def expanded(entry: Any) -> Any:
        ((title, path),) = entry.items()
        return {title: pages_of(docs, path) if path.endswith("/") else path}

    # mkdocs derives its warnings from the list of the file, so that it has to be replaced.
    config.nav = [expanded(entry) for entry in config.nav or []]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the scripts."""
    packages = os.environ.get(PACKAGES)
    if packages is None:
        raise PluginError(f"{PACKAGES} names no directory; use `tests/run book`")
    for path, source in SCRIPTS.items():
        script = Path(packages, source).resolve()
        files.append(File.generated(config, path, abs_src_path=str(script)))
