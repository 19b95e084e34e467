# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks: what docs/ links to outside of itself becomes part of the site.

The Markdown is written for whoever reads it in the repository: `../CONTRIBUTING.md`, `../../spec/cases/...`. On the site the pages of
`PAGES` have places of their own, and every other file that a page links to is copied to `source/`, as text that a browser shows.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the site that lie beside docs/: path in the repository -> path in docs/ as MkDocs sees it."""
SHOWN = (".svg", ".png", ".html")
"""Ends of names that a browser shows as they are; all else gets `.txt` after its name."""
LINK = re.compile(
    r"(?P<code>^ *(?P<fence>```+).*?^ *(?P=fence) *$|(?P<tick>`+)[^`].*?(?P=tick))|(?<=\]\()(?P<target>[^)\s]+)",
    re.M | re.S,
)
"""Code, which is left alone, or the target of an inline link."""


def slug(text: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it: a link that works in the repository works on the site."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def copy_of(path: str, uri: str, config: Any) -> Any:
    """MkDocs' entry for the repository's file `path`, at `uri` of docs/."""
    from mkdocs.structure.files import (
        File,
    )  # here, so that what needs no MkDocs can be used without it

    return File.generated(config, uri, abs_src_path=str(ROOT / path))


def expanded(nav: list[Any]) -> list[Any]:
    """The navigation with every `folder/*` replaced by the folder's pages: as its README.md mentions them, then by name."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            found.append(
                {
                    title: expanded(inner) if isinstance(inner, list) else inner
                    for title, inner in entry.items()
                }
            )
        elif entry.endswith("/*"):
            folder = DOCS / entry.removesuffix("/*")
            index = folder / "README.md"
            named = (
                re.findall(r"\]\(([\w.-]+\.md)", index.read_text(encoding="utf-8"))
                if index.exists()
                else []
            )
            pages = dict.fromkeys(
                ["README.md"] * index.exists()
                + named
                + sorted(page.name for page in folder.glob("*.md"))
            )
            found += [f"{folder.name}/{page}" for page in pages if (folder / page).exists()]
        else:
            found.append(entry)
    return found


def on_config(config: Any) -> Any:
    """Fill in the navigation, and give headings GitHub's anchors."""
    config.nav = expanded(config.nav)
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slug}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie beside docs/."""
    for path, uri in PAGES.items():
        files.append(copy_of(path, uri, config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's text with its links as MkDocs wants them; adds files that are linked to and are no pages to `files`.

    A link that leads nowhere is left as it is: MkDocs warns about it.
    """
    home = Path(page.file.abs_src_path).relative_to(ROOT)
    markdown = re.sub(
        r"\A\s*<!--.*?-->\s*", "", markdown, flags=re.S
    )  # before a heading it would keep MkDocs from seeing the title

    def changed(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        path, _, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(home.parent.as_posix(), path))
        if not (ROOT / place).is_file():
            return found[0]
        uri = uri_of(place)
        if uri.startswith("source/") and files.get_file_from_path(uri) is None:
            files.append(copy_of(place, uri, config))
        link = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link}#{anchor}" if anchor else link

    return LINK.sub(changed, markdown).replace(
        "<details>", '<details markdown="1">'
    )  # what is in it is Markdown, too


def uri_of(place: str) -> str:
    """Where a file of the repository is on the site, as a path in docs/: a page, a picture of docs/, or a copy in `source/`."""
    if place in PAGES:
        return PAGES[place]
    inside = place.removeprefix("docs/")
    if inside != place and place.endswith((".md", *SHOWN)):
        return inside
    return f"source/{place}" if place.endswith(SHOWN) else f"source/{place}.txt"


def on_post_build(config: Any) -> None:
    """The site is read without network, also from a folder: fail if a page loads anything from elsewhere."""
    from mkdocs.exceptions import PluginError

    index = Path(
        config.site_dir, "search", "search_index.json"
    )  # from a folder, pages ask for it as a script (and hide the search)
    index.with_suffix(".js").write_text(
        "var __index = " + index.read_text(encoding="utf-8"), encoding="utf-8"
    )
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for tag in re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8")
        ):
            source = re.search(r'\b(?:src|href)="?((?:https?:)?//[^"\s>]+)', tag)
            if source is not None:
                raise PluginError(f"{page.relative_to(config.site_dir)} loads {source[1]}")
