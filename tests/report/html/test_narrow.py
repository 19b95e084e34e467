# SPDX-License-Identifier: Apache-2.0
"""Tests that report.html fits the width of a telephone.

Needs Chromium, and no driver. A window cannot be as narrow, so the page is opened in a frame.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from html_rig import many, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--allow-file-access-from-files",
    "--virtual-time-budget=8000",
    "--dump-dom",
)
WIDTH = 400
FRAME = """<!doctype html><body style="margin:0"><p id="told"></p>
<iframe src="{page}" style="width:{width}px;height:4000px;border:0"></iframe><script>
onload = () => setTimeout(async () => {{
  const frame = document.querySelector("iframe"), page = frame.contentDocument;
  page.querySelectorAll("details").forEach((one) => {{ one.open = true; }});
  for (const box of page.querySelectorAll(".timeline")) await frame.contentWindow.eval("open")(box);
  await new Promise((done) => setTimeout(done, 500));
  document.getElementById("told").textContent = {expression};
}}, 500);
</script></body>"""
WIDE = 'page.documentElement.scrollWidth + " wide, " + page.querySelectorAll(".events li").length'
NUMBERS = """(() => {
  const item = page.querySelector(".toc li"), text = page.createElement("span");
  text.textContent = "99.";
  item.append(text);
  const left = (one) => one.getBoundingClientRect().left;
  return left(item) - left(page.querySelector("h1")) + " " + text.getBoundingClientRect().width;
})()"""


def measured(page: Path) -> tuple[int, int]:
    """Return the width of what the page shows with all unfolded, and its number of events."""
    found = re.fullmatch(r"(\d+) wide, (\d+)", evaluated(page, WIDE))
    assert found
    return int(found[1]), int(found[2])


def evaluated(page: Path, expression: str) -> str:
    """Return the value of an expression of JavaScript about the page with all unfolded."""
    frame = page.with_name("frame.html")
    text = FRAME.format(page=page.name, width=WIDTH, expression=expression)
    frame.write_text(text, encoding="utf-8")
    assert CHROMIUM is not None
    home = f"--user-data-dir={page.with_name('home')}"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, home, frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'id="told">([^<]+)<', done.stdout)
    assert found, done.stderr[-800:]
    return found[1]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_nothing_juts_out_at_the_width_of_a_telephone(tmp_path: Path) -> None:
    page = page_of(tmp_path, failures=3, first=["save.owned", "load.position"])
    width, events = measured(page)
    assert events and width <= WIDTH
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("max-width: 100%", "min-width: 420px"), encoding="utf-8")
    assert measured(page)[0] > WIDTH, "what juts out is noticed"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_long_run_does_not_jut_out_either(tmp_path: Path) -> None:
    width, events = measured(page_of(tmp_path, failures=1, story=many(requests=8, steps=300)))
    assert events and width <= WIDTH


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_list_has_room_for_numbers_of_two_digits(tmp_path: Path) -> None:
    room, width = map(float, evaluated(page_of(tmp_path, failures=1), NUMBERS).split())
    assert room >= width + 8  # what browsers put between a number and its text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_one_of_a_kind_is_singular(tmp_path: Path) -> None:
    cell = '{shown: [[1, "placeholder"], [2, "placeholder"], [1, "draft"], [1, "computed"]]}'
    said = evaluated(page_of(tmp_path, failures=1), f"frame.contentWindow.described({cell})")
    assert said == "1 placeholder, 2 placeholders, 1 draft, 1 computed"
