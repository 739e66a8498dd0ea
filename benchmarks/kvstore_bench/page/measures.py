"""What is measured of the page, one function a promise. All drive a real daemon and a real tab."""

from __future__ import annotations

import http.client
import http.server
import os
import signal
import statistics
import threading
import time
from typing import Any

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore_bench.page.browser import (
    FIRST_FIGURES,
    Browser,
    Tab,
    axe_violations,
    wait_until,
)
from kvstore_bench.page.workload import HOSTILE, RECORD_NBYTES, hostile, model
from kvstore_bench.store.store import chain

OPENINGS = 5
PUTS = 5
STOPPED_S = 6.0
BACK_S_MAX = 15.0
FRAMES = 600
HEALTHY = "() => document.querySelector('#health').textContent === 'healthy'"
AWAY = "() => document.querySelector('#health').textContent === 'away'"
ONE_FRAME = """steps => new Promise(done => requestAnimationFrame(() => {
  for (const node of document.querySelectorAll('.scroll'))
    node.scrollTop = (node.scrollHeight - node.clientHeight) * (0.5 - 0.5 * Math.cos(steps / 60))
  requestAnimationFrame(done)
}))"""
# What the page has of memory: scripts, elements and what belongs to them, as the browser counts it.
PAGE_NBYTES = "() => performance.measureUserAgentSpecificMemory().then(found => found.bytes)"
# Notes the first frame of the screen that has figures.
WATCH_FIGURES = f"""(function look() {{
  if (document.querySelector({FIRST_FIGURES!r})) window.drawnMs = performance.now()
  else requestAnimationFrame(look)
}})()"""
SAYS = "([query, text]) => document.querySelector(query).textContent.includes(text)"
# One frame's work: from its begin, before scripts, to the end of layout and paint, which comes
# before the message that was sent in it is delivered.
FRAME_MS = """frames => new Promise(done => {
  const took = [], channel = new MessageChannel(), seen = document.querySelectorAll('.scroll')
  let began = 0, steps = 0
  channel.port1.onmessage = () => {
    took.push(performance.now() - began)
    if (took.length < frames) requestAnimationFrame(step); else done(took)
  }
  function step(at) {
    began = performance.now()
    steps += 1
    for (const node of seen) {
      const room = node.scrollHeight - node.clientHeight
      node.scrollTop = room * (0.5 - 0.5 * Math.cos(steps / 60))
    }
    channel.port2.postMessage(0)
  }
  requestAnimationFrame(step)
})"""


def first_figures(browser: Browser, address: str) -> dict[str, Any]:
    """Return the seconds until the first figures are drawn, each time in a fresh profile; the first
    is of a daemon that nobody had looked at.

    They count from the begin of the navigation, as the browser's own clock has it, redirection
    included. wall: from Playwright's command, which also starts a process for the tab.
    """
    times, walls = [], []
    for _ in range(OPENINGS):
        page = browser.blank()
        page.add_init_script(WATCH_FIGURES)
        began = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.wait_for_selector(FIRST_FIGURES)
        walls.append(time.perf_counter() - began)
        wait_until(page, "() => window.drawnMs > 0")
        times.append(page.evaluate("window.drawnMs") / 1e3)
        page.context.close()
    return {
        "first_figures_s": statistics.median(times),
        "first_figures_cold_s": times[0],
        "first_figures_wall_s": statistics.median(walls),
    }


def put_seen(tab: Tab, target: str) -> dict[str, Any]:
    """Return the seconds from the begin of a put until the page lists it, the most of several."""
    spec = model("probe")
    times = []
    tab.page.fill("#request-filter", "probe-")
    for number in range(PUTS):
        name = f"probe-{number}"
        with Client(target, name=name) as client:
            client.register(spec)
            keys = chain(spec.id, 4, salt=name.encode())
            time.sleep(0.37 * number)  # at another moment of the page's second each time
            began = time.perf_counter()
            client.put(spec.id, keys, [bytes(RECORD_NBYTES)] * 4)
            wait_until(
                tab.page,
                "name => [...document.querySelectorAll('#request-list .row')]"
                ".some(row => row.textContent.includes(name))",
                name,
            )
            times.append(time.perf_counter() - began)
    tab.page.fill("#request-filter", "")
    return {"put_seen_s": max(times), "put_seen_p50_s": statistics.median(times)}


def outages(tab: Tab, daemon: Daemon) -> dict[str, Any]:
    """Stop the daemon, then kill it. back_s: from the moment it serves again until the page says
    so, the longer of the two."""
    says, back = [], {}
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        says.append(_says(tab, AWAY))
        time.sleep(STOPPED_S)
        says.append(bool(tab.page.evaluate(AWAY)))
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    back["stopped"] = _back_s(tab)
    daemon.kill()
    says.append(_says(tab, AWAY))
    daemon.start()
    back["killed"] = _back_s(tab)
    tab.forget_outage()
    return {"says_away": all(says), "back_s": max(back.values()), "back": back}


def _says(tab: Tab, what: str) -> bool:
    wait_until(tab.page, what, timeout_s=BACK_S_MAX)
    return True


def _back_s(tab: Tab) -> float:
    began = time.perf_counter()
    wait_until(tab.page, HEALTHY, timeout_s=BACK_S_MAX)
    return time.perf_counter() - began


def frames(tab: Tab) -> dict[str, Any]:
    """Return how long frames take while both lists are scrolled through, in milliseconds, and what
    the tab's process has of memory."""
    took = sorted(tab.page.evaluate(FRAME_MS, FRAMES))
    cpu = sorted(_frames_cpu(tab))
    shown = tab.page.evaluate(
        "[...document.querySelectorAll('.scroll')].map("
        "node => Number(node.getAttribute('aria-rowcount')) - 1)"
    )
    return {
        "frame_ms_p50": took[len(took) // 2],
        "frame_ms_p99": took[int(len(took) * 0.99)],
        "frame_ms_max": took[-1],
        "requests_shown": shown[0],
        "nodes_shown": shown[1],
        "frame_cpu_ms_p50": cpu[len(cpu) // 2],
        "frame_cpu_ms_p99": cpu[int(len(cpu) * 0.99)],
        "page_mb": tab.page.evaluate(PAGE_NBYTES) / 1e6,
    }


def _frames_cpu(tab: Tab) -> list[float]:
    """Return the processor time of the tab's main thread for each frame, in milliseconds: what a
    frame takes where nothing else uses the machine. Playwright's own command is in it."""
    client = tab.page.context.new_cdp_session(tab.page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})
    found, before = [], _task_s(client)
    for step in range(FRAMES // 2):
        tab.page.evaluate(ONE_FRAME, step)
        now = _task_s(client)
        found.append((now - before) * 1e3)
        before = now
    return found


def _task_s(client: Any) -> float:
    metrics = client.send("Performance.getMetrics")["metrics"]
    return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")


def expand_all(tab: Tab) -> None:
    """Let the page fetch the whole tree."""
    tab.page.click("#tree-all")
    wait_until(tab.page, "() => !document.querySelector('#tree-all').disabled", timeout_s=300)


def injections(browser: Browser, address: str, target: str) -> dict[str, Any]:
    """Return how many scripts ran of those that hostile names are."""
    hostile(target)
    tab = browser.open(address)
    page = tab.page
    for panel in ("#conversations", "#spaces"):
        wait_until(page, SAYS, [panel, HOSTILE])
    page.fill("#request-filter", "<img")
    page.locator("#request-list .row:not([hidden])").first.click()
    wait_until(page, SAYS, ["#why", HOSTILE])
    page.select_option("#tree-by", "conversation")
    page.fill("#tree-what", HOSTILE)
    page.click("#tree-search button")
    page.wait_for_timeout(1500)
    ran = page.evaluate("window.ran ?? 0") + len(tab.dialogs)
    return {
        "scripts_run": ran,
        "images_made": page.locator("img").count(),
        "hostile_names_shown": True,
    }


def strangers(browser: Browser, daemon: Daemon) -> dict[str, Any]:
    """Return what a request for another's name gets, and what another site gets."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.metrics_port, timeout=5)
    connection.request("GET", "/", headers={"Host": "rebound.example"})
    status = connection.getresponse().status
    connection.close()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = browser.blank()
        page.goto(daemon.page_address)  # this profile has the cookie
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        told = page.evaluate(
            "url => fetch(url, {credentials: 'include'})"
            ".then(reply => reply.text(), () => 'refused')",
            f"http://127.0.0.1:{daemon.metrics_port}/api/status",
        )
        page.context.close()
    finally:
        server.shutdown()
        server.server_close()
    return {"foreign_host_status": status, "other_origin_refused": told == "refused"}


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """Another user's site on a port of this host."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><html lang=en><title>elsewhere</title>")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def accessibility(browser: Browser, address: str) -> dict[str, Any]:
    """Return what axe-core finds in the page: light and dark, wide and narrow, with an explanation
    open."""
    found = []
    for dark, wide in ((False, 1440), (True, 1440), (False, 360), (True, 3840)):
        tab = browser.open(address, dark=dark, wide=wide, bypass_csp=True)
        tab.page.wait_for_selector("#request-list .row:not([hidden])")
        tab.page.locator("#request-list .row:not([hidden])").first.click()
        tab.page.wait_for_selector("#why:not([hidden])")
        tab.page.wait_for_selector("#tree-list .row:not([hidden])")
        found += [{**each, "wide": wide, "dark": dark} for each in axe_violations(tab)]
        tab.page.context.close()
    return {"axe_violations": len(found), "axe_found": found}
