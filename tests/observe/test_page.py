"""Tests the status page in a real browser during training and after the loss of a server, in both
colour schemes and widths."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from chromium import Tab, chromium
from training import FRAGILE, JOB, TOKEN, fragile, tiers, training

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
import servers

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
#: The directory for screenshots.
PICTURES = TARGET / "status-page"
WIDTHS = {"wide": 1600, "narrow": 360}
#: The minimum contrast of text, from the Web Content Accessibility Guidelines, level AA.
CONTRAST = 4.5

#: A script that finds texts whose contrast with their background is too low.
LOW_CONTRAST = """
(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (value) =>
    value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([red, green, blue]) =>
    0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const background = (element) => {
    for (let of = element; of; of = of.parentElement) {
      const found = channels(getComputedStyle(of).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some(
      (node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!hasText || element.closest("svg, noscript") || !element.checkVisibility()) continue;
    const [a, b] = [channels(getComputedStyle(element).color), background(element)].map(luminance);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < LIMIT) low.push([element.textContent.trim().slice(0, 40), contrast]);
  }
  return low;
})()
""".replace("LIMIT", str(CONTRAST))

#: A script that finds elements that are wider than the window. In a wide window, tables may scroll.
OVERFLOWING = """
[...document.querySelectorAll("body *")].filter((element) =>
  element.getBoundingClientRect().right > innerWidth + 1 &&
  !element.closest(innerWidth > 560 ? ".scroll table, svg" : "thead, svg")
).map((element) => `${element.tagName} ${element.className} ${element.textContent.slice(0, 40)}`)
"""


class Page(unittest.TestCase):
    def test_the_page_shows_a_cluster_that_trains(self) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            running = servers.observed_servers([tiers(directory), [], []], TOKEN)
            address, (coordinator, *shards), processes = stack.enter_context(running)
            stack.enter_context(training(address, directory))
            stack.enter_context(fragile(address, directory))
            tab = stack.enter_context(chromium())
            self.check_cluster(tab, f"http://any:{TOKEN}@{coordinator}/", [address, *shards])
            self.check_refresh(tab)
            self.check_shard(tab, f"http://any:{TOKEN}@{shards[0]}/")
            processes[2].kill()
            self.check_loss(tab, f"http://any:{TOKEN}@{coordinator}/")
            self.assertEqual(tab.problems(), [])
            hosts = tuple(f"http://{of}/" for of in (coordinator, shards[0]))
            credentials = tuple(of.replace("//", f"//any:{TOKEN}@") for of in hosts)
            elsewhere = {
                url
                for url in tab.requested()
                if not url.startswith((*hosts, *credentials, "data:"))
            }
            self.assertEqual(elsewhere, set(), "the page loads nothing from other hosts")

    def check_layouts(self, tab: Tab, url: str, name: str) -> None:
        """Checks that nothing is wider than the window, and that all text is readable."""
        for scheme in ("light", "dark"):
            for size, width in WIDTHS.items():
                with self.subTest(f"{name}, {scheme}, {size}"):
                    tab.show(url, width, scheme)
                    tab.screenshot(PICTURES / f"{name}-{scheme}-{size}.png")
                    self.assertEqual(tab.evaluate(OVERFLOWING), [])
                    overflow = "document.documentElement.scrollWidth - innerWidth"
                    self.assertLessEqual(tab.evaluate(overflow), 0)
                    self.assertEqual(tab.evaluate(LOW_CONTRAST), [])

    def check_cluster(self, tab: Tab, url: str, addresses: list[str]) -> None:
        """Checks the page of a coordinator: jobs, curves, phases, late ranks, servers, events."""
        tab.show(url, WIDTHS["wide"], "light")
        has_curves = "document.querySelectorAll('.curve .line').length === 6"
        tab.wait(f"{has_curves} && document.body.textContent.includes('late ranks')")
        # Waits for a curve with enough points, and for reports of all servers.
        tab.wait("document.querySelector('.line').getAttribute('d').split('L').length > 20")
        used = "document.querySelectorAll('#scroll-servers .bar:has(rect)').length"
        tab.wait(f"{used} === 3")
        text = tab.evaluate("document.body.textContent")
        for expected in (
            JOB,
            "training",
            "Loss",
            "Gradient norm",
            "Steps per second",
            "Phases of a step",
            "Late ranks",
            "rank 1",
            "Bytes of slices by server",
            "Last checkpoint",
            "Events",
            "joined, id",
            "has all its initial parameters",
            "2 of 2",
        ):
            self.assertIn(expected, text)
        rows: Any = lambda table: tab.evaluate(
            f"document.querySelectorAll('{table} tbody tr').length"
        )
        self.assertEqual((rows("#scroll-jobs"), rows("#scroll-servers")), (2, 3))
        totals = "[...document.querySelectorAll('.bars tr:has(.map) .number')]"
        for total in tab.evaluate(f"{totals}.map((total) => total.textContent)"):
            self.assertRegex(total, r"^[\d.]+ (B|KiB) \+ [\d.]+ (B|KiB)$")
        self.assertGreater(tab.evaluate("document.querySelectorAll('.map .own').length"), 3)
        self.assertGreater(tab.evaluate("document.querySelectorAll('.map .copy').length"), 3)
        loss = tab.evaluate("Number(document.querySelector('.curve strong').textContent)")
        self.assertTrue(0 < loss < 10, loss)
        self.check_layouts(tab, url, "coordinator")

    def check_refresh(self, tab: Tab) -> None:
        """Checks that a refresh keeps the focus, the scroll positions of page and lists, and the
        filter of events."""
        tab.evaluate("document.querySelector('main').className = 'old'")
        tab.evaluate("scrollTo(0, 500); document.querySelector('#scroll-events').scrollTop = 60")
        tab.evaluate("document.querySelector('#scroll-events').focus({ preventScroll: true })")
        tab.wait("!document.querySelector('main.old')")
        positions = "[scrollY, document.querySelector('#scroll-events').scrollTop]"
        self.assertEqual(tab.evaluate(positions), [500, 60])
        self.assertEqual(tab.evaluate("document.activeElement.id"), "scroll-events")
        tab.evaluate("document.querySelector('#filter-error').click()")
        tab.wait("!!document.querySelector('#filter-error[aria-current]')")
        tab.evaluate("document.querySelector('main').className = 'old'")
        tab.wait("!document.querySelector('main.old')")
        self.assertTrue(tab.evaluate("!!document.querySelector('#filter-error[aria-current]')"))
        self.assertTrue(tab.evaluate("document.querySelector('#stale').hidden"))

    def check_loss(self, tab: Tab, url: str) -> None:
        """Checks that the page shows a missing server and a failed job, and what to do."""
        tab.show(url, WIDTHS["wide"], "light")
        tab.wait("document.querySelectorAll('.state.bad').length > 2")
        text = tab.evaluate("document.body.textContent")
        for expected in ("2 of 3", "1 failed", "A shard server is missing.", "lost"):
            self.assertIn(expected, text)
        commands = tab.evaluate(
            "[...document.querySelectorAll('code')].map((of) => of.textContent)"
        )
        self.assertIn(f"zsctl delete {FRAGILE}", commands)
        self.assertTrue(any(of.startswith("zsctl drain 127.0.0.1:") for of in commands), commands)
        # The job that saves often does not displace warnings and errors.
        tab.show(f"{url}?events=warning", WIDTHS["wide"], "light")
        shown = "[...document.querySelectorAll('.events .state')].map((of) => of.textContent)"
        self.assertEqual(set(tab.evaluate(shown)), {"warning", "error"})
        self.check_layouts(tab, url, "loss")

    def check_shard(self, tab: Tab, url: str) -> None:
        """Checks the page of a shard server: its slices, memory and requests."""
        tab.show(url, WIDTHS["wide"], "light")
        tab.wait("document.querySelectorAll('#scroll-contributions tbody tr').length > 1")
        text = tab.evaluate("document.body.textContent")
        for expected in (
            JOB,
            "Gradients of the last step",
            "Memory of this server",
            "disk",
            "versions of readers",
            "DataService/Push",
        ):
            self.assertIn(expected, text)
        slices = "document.querySelectorAll('.map .own, .map .copy').length"
        self.assertGreater(tab.evaluate(slices), 0)
        self.check_layouts(tab, url, "shard")


if __name__ == "__main__":
    unittest.main()
