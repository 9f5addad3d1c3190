"""A browser and the built site, for the tests and for screenshots."""

import contextlib
import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "_build" / "html"
# Nothing but the site may be asked for: these stop the browser's own calls home.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


def required() -> bool:
    """On a machine that builds for others a missing browser is a failure and not a reason to skip."""
    return any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "REQUIRE_BROWSER"))


def launch(playwright):
    """The system's Chromium if there is one, else the one that `playwright install chromium` has put in place."""
    system = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
    return playwright.chromium.launch(executable_path=system, args=FLAGS)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served():
    """The address of the site, while it is being served."""
    handler = functools.partial(_Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def pages() -> list[str]:
    """Every page of the book, by its address in the site."""
    return sorted(str(path.relative_to(SITE)) for folder in ("book", "notebooks") for path in (SITE / folder).glob("*.html"))
