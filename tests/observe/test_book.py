"""The pages of the documentation in a real browser: each diagram is drawn, and nothing is loaded
from other hosts. `tests/run book` has built them."""

from __future__ import annotations

import os
import unittest
from pathlib import Path

from chromium import Tab, chromium

ROOT = Path(__file__).resolve().parents[2]
BOOK = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "book"
#: The element of a diagram in the source of a page. The script replaces it by a drawing.
SOURCE = '<pre class="mermaid">'
#: The least height of a drawing in pixels. It is in a closed shadow tree, which nothing can read.
LEAST = 60


class Book(unittest.TestCase):
    def test_diagrams_are_drawn_and_pages_load_nothing_from_other_hosts(self) -> None:
        pages = {
            page: text.count(SOURCE)
            for page in sorted(BOOK.rglob("*.html"))
            if SOURCE in (text := page.read_text())
        }
        self.assertGreaterEqual(sum(pages.values()), 8)
        with chromium() as tab:
            for page, diagrams in pages.items():
                with self.subTest(str(page.relative_to(BOOK))):
                    tab.show(page.as_uri(), 1400, "light")
                    drawn = "[...document.querySelectorAll('div.mermaid')]"
                    high = f"{drawn}.filter((of) => of.offsetHeight > {LEAST})"
                    tab.wait(f"{high}.length === {diagrams}")
            self.assertEqual(tab.problems(), [])
            elsewhere = {of for of in tab.requested() if not of.startswith(("file:", "data:"))}
            self.assertEqual(elsewhere, set())
            self.check_search(tab)

    def check_search(self, tab: Tab) -> None:
        """The search works in pages that are opened as files."""
        tab.show((BOOK / "index.html").as_uri(), 1400, "light")
        tab.evaluate("document.querySelector('.md-search__input').focus()")
        tab.evaluate(
            "(() => { const input = document.querySelector('.md-search__input');"
            " input.value = 'accumulate gradients';"
            " input.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
        )
        tab.wait("document.querySelectorAll('.md-search-result__link').length > 0")
