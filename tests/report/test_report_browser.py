"""The page in a real headless Chromium: nothing overflows, nothing is fetched."""

import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from xsparse.report import make

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Measured in a frame of the wanted width: a browser's own window has a smallest width.
PROBE = """<!doctype html><body style="margin:0"><iframe id="f" src="/report.html"
 style="width:%dpx;height:900px;border:0"></iframe><pre id="out"></pre><script>
document.getElementById("f").onload = () => {
  const frame = document.getElementById("f"), page = frame.contentDocument;
  const width = page.documentElement.clientWidth;
  for (const fold of page.querySelectorAll("details")) fold.open = true;
  const inside = (e) => e.closest(".scroll");
  const wide = [...page.querySelectorAll("body *")].filter(
    (e) => !inside(e.parentElement) && e.getBoundingClientRect().right > width + 0.5);
  document.getElementById("out").textContent = JSON.stringify({
    width, scroll: page.documentElement.scrollWidth,
    wide: wide.map((e) => e.tagName + "." + e.className),
    images: [...page.images].map((i) => i.naturalWidth),
    scrolling: [...page.querySelectorAll(".scroll")].some((e) => e.scrollWidth > e.clientWidth),
    fetched: frame.contentWindow.performance.getEntriesByType("resource")
      .map((e) => e.name).filter((name) => !name.startsWith("data:")),
  });
};</script>"""


@pytest.fixture(scope="module")
def site(many_tasks, tmp_path_factory):
    """A server of the page and its probe; it also notes every path that was asked for."""
    page = make(many_tasks, out=tmp_path_factory.mktemp("page")).read_bytes()
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            asked.append(self.path)
            probe = re.fullmatch(r"/probe/(\d+)", self.path)
            body = (PROBE % int(probe[1])).encode() if probe else page
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], asked
    server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_fits_and_fetches_nothing(site, tmp_path, width):
    port, asked = site
    asked.clear()
    profile = f"--user-data-dir={tmp_path}"
    url = f"http://127.0.0.1:{port}/probe/{width}"
    size = "--window-size=1500,1000"
    command = [str(CHROMIUM), *FLAGS, profile, size, "--virtual-time-budget=8000", "--dump-dom"]
    ran = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="out">(.+?)</pre>', ran.stdout, re.DOTALL)
    assert found, ran.stderr[-2000:]
    seen = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert abs(seen["width"] - width) <= 20  # a scroll bar may take some of it
    assert seen["scroll"] <= seen["width"]
    assert seen["wide"] == []
    assert seen["images"]
    assert all(seen["images"])
    assert seen["scrolling"]  # wide tables scroll inside their own container
    assert seen["fetched"] == []
    assert set(asked) <= {f"/probe/{width}", "/report.html", "/favicon.ico"}
