# SPDX-License-Identifier: Apache-2.0
"""Tests of report.html in a real browser.

Needs Chromium, its driver and selenium: `nox -s browser`.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (nox -s browser)")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from browser_rig import needed, opened, timeline
from html_rig import many, page_of

pytestmark = needed


def wait(browser: Any, script: str) -> Any:
    """Until the script gives something."""
    return WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(script))


def test_every_failure_is_reached_by_keyboard(browser: Any, tmp_path: Path) -> None:
    opened(browser, page_of(tmp_path, failures=3))
    reached = []
    for _ in range(3):
        (
            browser.switch_to.active_element
            if reached
            else browser.find_element(By.TAG_NAME, "body")
        ).send_keys("n")
        reached.append(
            browser.execute_script("return document.activeElement.closest('.failure').id")
        )
    shown = [one.get_attribute("id") for one in browser.find_elements(By.CSS_SELECTOR, ".failure")]
    assert reached == shown and len(set(shown)) == 3
    browser.switch_to.active_element.send_keys("p")
    assert (
        browser.execute_script("return document.activeElement.closest('.failure').id") == shown[1]
    )


def test_the_sentence_is_on_the_first_screen(browser: Any, tmp_path: Path) -> None:
    for width in (1280, 400):
        opened(browser, page_of(tmp_path, failures=1), width)
        bottom = browser.execute_script(
            "return document.querySelector('.toc li').getBoundingClientRect().bottom"
        )
        assert 0 < bottom < browser.execute_script("return innerHeight")
        assert browser.execute_script(
            "return document.documentElement.scrollWidth <= innerWidth + 1"
        ), "it fits the width"


def test_a_timeline_begins_at_the_violation_and_follows_the_keys(
    browser: Any, tmp_path: Path
) -> None:
    opened(browser, page_of(tmp_path, failures=1))
    box = timeline(browser)
    output, canvas = (
        box.find_element(By.TAG_NAME, "output"),
        box.find_element(By.CSS_SELECTOR, ".view canvas"),
    )
    assert output.text == "3 of 6"
    assert "WRONG KV" in box.find_element(By.CSS_SELECTOR, ".events li.marked").text
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert output.text == "4 of 6"
    canvas.send_keys(Keys.HOME)
    canvas.send_keys("f")
    assert output.text == "3 of 6"
    said = browser.find_element(By.ID, canvas.get_attribute("aria-describedby")).text
    assert "step 3, request b" in said and "WRONG KV: positions 4-7" in said


def test_a_link_opens_the_consequence_that_it_names(browser: Any, tmp_path: Path) -> None:
    page = page_of(tmp_path, failures=2, first=["save.owned", "load.position"])
    opened(browser, page)
    assert not browser.execute_script("return document.querySelector('.consequence').open")
    name = browser.find_element(By.CSS_SELECTOR, ".consequence").get_attribute("id")
    assert name == "load.position-1"
    browser.execute_script(f"location.hash = '#{name}'")
    wait(browser, "return document.querySelector('.consequence').open")
    wait(browser, "return [...timelines.values()].filter(Boolean).length === 2")
    top = "return document.querySelector('.consequence').getBoundingClientRect().top"
    assert -1 <= browser.execute_script(top) < 400


NUMBERS = """
const one = [...timelines.values()][0], { drawing, story } = one;
return story.byLane.flat().map((cell) => drawing.pieces(cell).map((piece) =>
  [drawing.x(cell.step) + piece.x, drawing.y(drawing.lanes.indexOf(cell.lane)) + CELL,
   piece.w, TALL, textWidth(piece.text), cell.step, cell.lane]));
"""
ROUTES = """
const { drawing, story } = [...timelines.values()][0];
return [...story.wrongAt.values()].flat().map((one, i) => drawing.route(one, i));
"""


def test_numbers_have_room_and_columns_share_the_width(browser: Any, tmp_path: Path) -> None:
    for width in (1280, 400):
        opened(browser, page_of(tmp_path, failures=1), width)
        timeline(browser)
        cells = browser.execute_script(NUMBERS)
        assert max(len(cell) for cell in cells) > 1, "a cell with several numbers"
        for cell in cells:
            for (x, _, w, _, text, *_), after in zip(cell, [*cell[1:], None], strict=True):
                assert text + 2 <= w
                assert after is None or x + w <= after[0] + 0.01
        room = "const { drawing, view } = [...timelines.values()][0]; "
        rest = browser.execute_script(room + "return view.clientWidth - drawing.width")
        column = browser.execute_script(room + "return drawing.column")
        assert column == 120 or rest < 7, "as wide as the view, or as a column may be"


def test_an_arrow_hides_no_number(browser: Any, tmp_path: Path) -> None:
    opened(browser, page_of(tmp_path, failures=1))
    timeline(browser)
    cells = [number for cell in browser.execute_script(NUMBERS) for number in cell]
    (route,) = browser.execute_script(ROUTES)
    (start_x, start_y), end = route[0], route[-1]
    origin = next(one for one in cells if one[5:] == [1, 0])
    assert origin[0] <= start_x <= origin[0] + origin[2], "above the number that it starts from"
    assert origin[1] - 8 < start_y <= origin[1] - 3
    target = next(one for one in cells if one[5:] == [3, 2])
    assert target[0] <= end[0] <= target[0] + target[2] and end[1] == target[1]
    for (x1, y1), (x2, y2) in itertools.pairwise(route):
        for x, y, w, h, *_ in cells:
            apart_x = max(x1, x2) <= x or min(x1, x2) >= x + w
            apart_y = max(y1, y2) <= y or min(y1, y2) >= y + h
            assert apart_x or apart_y


def test_filters(browser: Any, tmp_path: Path) -> None:
    opened(browser, page_of(tmp_path, failures=1))
    box = timeline(browser)
    before = len(box.find_elements(By.CSS_SELECTOR, ".events li"))
    box.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("nobody")
    assert len(box.find_elements(By.CSS_SELECTOR, ".events li")) < before
    find = browser.find_element(By.ID, "find")
    find.send_keys("hook.no-raise")
    shown = browser.execute_script(
        "return [...document.querySelectorAll('.area tbody tr')].filter((row) => "
        "!row.hidden).length"
    )
    assert shown == 1 and browser.find_element(By.ID, "found").text == "1 requirements"


def test_of_a_long_run_of_many_requests_only_what_is_in_view_is_drawn(
    browser: Any, tmp_path: Path
) -> None:
    path = page_of(tmp_path, failures=1, story=many(requests=100, steps=1000))
    assert path.stat().st_size < 3 << 20
    opened(browser, path)
    timeline(browser)
    drawn = browser.execute_script(
        "let count = 0; const cell = Drawing.prototype.cell;"
        "Drawing.prototype.cell = function (...all) { count++; return cell.apply(this, all); };"
        "const one = [...timelines.values()][0]; one.go(500); count = 0; one.draw(); return count"
    )
    seen = browser.execute_script(
        "const { view } = [...timelines.values()][0]; "
        "const { column } = [...timelines.values()][0].drawing; "
        "return (view.clientWidth / column + 4) * (view.clientHeight / LANE + 4)"
    )
    assert 50 < drawn <= seen < 3000


def test_nothing_serious_for_those_who_do_not_see(browser: Any, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_selenium_python", reason="axe is not installed (nox -s browser)")
    opened(browser, page_of(tmp_path, failures=2))
    timeline(browser)
    checker = axe.Axe(browser)
    checker.inject()
    found = [one for one in checker.run()["violations"] if one["impact"] in ("serious", "critical")]
    assert not found, json.dumps(
        [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found], indent=1
    )
