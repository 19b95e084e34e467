# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for the tests of a module."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed (nox -s browser)"
    )
    chromium, driver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield page
    finally:
        page.quit()
