// Replaces the content of the page every two seconds. The focus and the scroll positions of the page
// and of tables are kept.
"use strict";

const INTERVAL = 2000;
// The time limit of a request.
const TIMEOUT = 10000;
const stale = document.getElementById("stale");

// Elements that can be scrolled or have the focus are found again by their ids or links.
function replaceMain(page) {
  const next = page.querySelector("main");
  if (!next) throw new Error("the answer is not a status page");
  const scrolled = [...document.querySelectorAll("[id^=scroll-]")].map(
    (element) => [element.id, element.scrollLeft, element.scrollTop]);
  const focused = document.activeElement;
  const focus = focused && focused.closest("main") ? [focused.id, focused.getAttribute("href")] : null;
  document.querySelector("main").replaceWith(next);
  for (const [id, left, top] of scrolled) {
    const element = document.getElementById(id);
    if (element) element.scrollTo(left, top);
  }
  if (focus) {
    const [id, href] = focus;
    const element = id ? document.getElementById(id)
      : [...document.querySelectorAll("main a")].find((link) => link.getAttribute("href") === href);
    if (element) element.focus({ preventScroll: true });
  }
  document.title = page.title;
}

async function refresh() {
  // A refresh would clear the selection.
  const isSelecting = getSelection() && !getSelection().isCollapsed;
  if (document.hidden || isSelecting) return;
  try {
    const answer = await fetch(location.origin + location.pathname + location.search, { signal: AbortSignal.timeout(TIMEOUT) });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    replaceMain(new DOMParser().parseFromString(await answer.text(), "text/html"));
    stale.hidden = true;
  } catch (error) {
    if (stale.hidden) {
      const time = new Date().toLocaleTimeString();
      stale.textContent = `The page has not been updated since ${time}: ${error.message}`;
      stale.hidden = false;
    }
  }
}

async function run() {
  for (;;) {
    await new Promise((resume) => setTimeout(resume, INTERVAL));
    await refresh();
  }
}

document.addEventListener("visibilitychange", refresh);
run();
