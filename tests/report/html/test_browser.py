# SPDX-License-Identifier: Apache-2.0
"""Tests of report.html in a real browser.

Needs Chromium, its driver and selenium: `nox -s browser`.
"""

from __future__ import annotations

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
    assert reached == ["failure-1", "failure-2", "failure-3"]
    browser.switch_to.active_element.send_keys("p")
    assert (
        browser.execute_script("return document.activeElement.closest('.failure').id")
        == "failure-2"
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
        "return (view.clientWidth / COLUMN + 4) * (view.clientHeight / LANE + 4)"
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
