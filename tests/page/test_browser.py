"""The page in headless Chromium: it opens from disk, says nothing on the console, fits a phone."""

import html
import re
import shutil
import subprocess

import pytest

from stages.page.page import page
from tests.helpers.runs import run_of

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")

ROUNDS = {"1": "models/sft"} | {str(k): f"models/policy/{k - 1}" for k in range(2, 13)}
TEXTS = ["plain", "</script><script>document.title='broken'</script>", "x" * 5000, "\u202eשלום\x00"]
MEASURE = """<script>
const root = document.documentElement, style = getComputedStyle(document.body);
parent.document.body.dataset.found =
  [innerWidth, root.scrollWidth, style.backgroundColor, document.title];
</script></body>"""


def seen(folder, text, *options, width=1200):
    """Width of the window and of what is in it, background and title of a page, once drawn.

    The page stands in a frame, as Chromium opens no window as narrow as a phone's.
    """
    file, inside = folder / "index.html", html.escape(text.replace("</body>", MEASURE))
    frame = (
        f'<iframe style="border: 0; width: {width}px; height: 600px" srcdoc="{inside}"></iframe>'
    )
    file.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{frame}</body>', encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder / 'browser'}", *options]
    command += ["--window-size=1400,800", "--virtual-time-budget=500", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-found="(\d+),(\d+),(rgb\([^)]*\)),([^"]*)"', done.stdout)
    assert found, done.stdout[-2000:]
    return int(found[1]), int(found[2]), found[3], found[4]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_runs_and_nothing_is_wider_than_the_window(tmp_path, width, text):
    window, content, _, title = seen(tmp_path, page(run_of(ROUNDS, text)), width=width)
    assert content <= window == width
    assert title.startswith("Report: 12 rounds of")


def test_the_page_is_dark_where_the_reader_prefers_it(tmp_path):
    text = page(run_of(ROUNDS))
    *_, light, _ = seen(tmp_path, text)
    *_, dark, _ = seen(tmp_path, text, "--blink-settings=preferredColorScheme=0")
    brightness = [sum(map(int, re.findall(r"\d+", colour))) for colour in (light, dark)]
    assert brightness[0] > 600 and brightness[1] < 150
