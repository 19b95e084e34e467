# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests of pages.

Needs Chromium, its driver and selenium: `nox -s browser`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (nox -s browser)")

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
needed = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="there is no Chromium, or no chromedriver"
)


def opened(browser: Any, path: Path, width: int = 1280) -> None:
    browser.set_window_size(width, 1000)
    browser.get(path.as_uri())
    assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def timeline(browser: Any, number: int = 0) -> Any:
    """The timeline of a failure, once it is drawn."""
    box = browser.find_elements(By.CSS_SELECTOR, ".timeline")[number]
    browser.execute_script("arguments[0].scrollIntoView()", box)
    WebDriverWait(browser, 20).until(lambda _: box.find_elements(By.CSS_SELECTOR, ".events li"))
    return box
