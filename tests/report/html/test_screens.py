# SPDX-License-Identifier: Apache-2.0
"""Tests of the appearance of report.html, against reviewed pictures in `screens/`.

After an intended change, regenerate them with KVCONFORM_SCREENS=write, look at each, and commit.
They are compared in coarse blocks: smoother letters make no difference, but other fonts do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed (nox -s browser)")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed (nox -s browser)")

from browser_rig import needed, opened, timeline  # noqa: E402
from html_rig import page_of  # noqa: E402

pytestmark = needed

SCREENS = Path(__file__).parent / "screens"
VIEWS = {"light": (1280, "light"), "dark": (1280, "dark"), "narrow": (400, "light")}
BLOCK = 16
MEAN, WORST = 2.0, 80.0
"""How far apart, of 255: blocks on average, and the one that differs most."""


def apart(one: Any, other: Any) -> tuple[float, float]:
    """Return the (mean, largest) difference, of 255, of the blocks of two pictures.

    It is 255 if their sizes differ by more than a block.
    """
    if abs(one.width - other.width) > BLOCK or abs(one.height - other.height) > BLOCK:
        return 255.0, 255.0
    size = (one.width // BLOCK, one.height // BLOCK)
    blocks = [
        list(picture.convert("L").resize(size, Image.Resampling.BOX).tobytes())
        for picture in (one, other)
    ]
    differences = [abs(a - b) for a, b in zip(*blocks, strict=True)]
    return sum(differences) / len(differences), max(differences)


def taken(browser: Any, page: Path, view: str, file: Path) -> Any:
    width, scheme = VIEWS[view]
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    try:
        opened(browser, page, width)
        timeline(browser)
        browser.execute_script("scrollTo(0, 0)")
        browser.save_screenshot(str(file))
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    return Image.open(file)


@pytest.mark.parametrize("view", VIEWS)
def test_it_looks_as_it_did(browser: Any, tmp_path: Path, view: str) -> None:
    page = page_of(tmp_path, failures=2)
    if os.environ.get("KVCONFORM_SCREENS") == "write":
        SCREENS.mkdir(exist_ok=True)
        taken(browser, page, view, SCREENS / f"{view}.png")
        pytest.skip("written: look at it")
    mean, worst = apart(
        taken(browser, page, view, tmp_path / "now.png"), Image.open(SCREENS / f"{view}.png")
    )
    assert mean < MEAN and worst < WORST, f"{mean:.1f} on average, {worst:.0f} in one block"


def test_a_page_without_its_timeline_or_its_colours_looks_different(
    browser: Any, tmp_path: Path
) -> None:
    page = page_of(tmp_path, failures=2)
    text = page.read_text(encoding="utf-8")
    reference = Image.open(SCREENS / "light.png")
    for style in (
        ".timeline { display: none !important }",
        ".failure, header.top { border: 0 !important } * { color: #888 !important }",
    ):
        page.write_text(text.replace("</style>", f"{style}</style>"), encoding="utf-8")
        opened(browser, page)
        browser.save_screenshot(str(tmp_path / "now.png"))
        mean, worst = apart(Image.open(tmp_path / "now.png"), reference)
        assert mean >= MEAN or worst >= WORST, f"{style}: {mean:.1f}, {worst:.0f}"
