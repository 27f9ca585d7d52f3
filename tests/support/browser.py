"""What headless Chromium makes of pages; tests are skipped where there is none."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FRAME = """<iframe style="border: 0" width="{width}" height="900" srcdoc="{page}"></iframe><script>onload = () => {{
  const root = document.querySelector("iframe").contentDocument.documentElement;
  const ink = getComputedStyle(root.querySelector("{selector}")).{ink};
  document.title = root.scrollWidth - root.clientWidth + " " + ink;
}}</script>"""


def dom(url: str, dark: bool = False) -> str:
    """The HTML of a page after its scripts have run for some seconds; writes into the current folder."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium to look at the page with")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--user-data-dir=profile")
    shown = (f"--blink-settings=preferredColorScheme={int(not dark)}", "--virtual-time-budget=5000", "--dump-dom")
    done = subprocess.run([browser, *flags, *shown, url], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def framed(page: str, width: int, dark: bool, selector: str, ink: str = "color") -> tuple[int, str]:
    """Pixels by which a page is wider than a frame of this width, and the color of an element."""
    Path("frame.html").write_text(FRAME.format(width=width, page=html.escape(page), selector=selector, ink=ink))
    made = dom(Path("frame.html").resolve().as_uri(), dark)
    match = re.search(r"<title>(\d+) (rgb\(.*?\))", made)
    assert match is not None, made[-500:]
    return int(match[1]), match[2]
