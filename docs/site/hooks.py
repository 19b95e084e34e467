# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks: files outside of docs/ that its pages link to become part of the site.

Links in the Markdown are those of the repository: `../CONTRIBUTING.md`, `../../spec/cases/...`. On
the site the pages of `PAGES` have places of their own. Every other file that a page links to is
copied to `source/`, as text that a browser shows.
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
"""Pages of the site outside of docs/: path in the repository -> path in docs/, as MkDocs has it."""
SHOWN = (".svg", ".png", ".html")
"""Endings of files that a browser shows as they are; `.txt` is appended to other names."""
LINK = re.compile(
    r"(?P<code>^ *(?P<fence>```+).*?^ *(?P=fence) *$|(?P<tick>`+)[^`].*?(?P=tick))"
    r"|(?<=\]\()(?P<target>[^)\s]+)",
    re.M | re.S,
)
"""Code, which must stay as it is, or the target of an inline link."""


def slug(text: str, separator: str = "-") -> str:
    """Return the anchor of a heading as GitHub makes it, so that its links work in both."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def copy_of(path: str, uri: str, config: Any) -> Any:
    """Return MkDocs' entry for the file `path` of the repository, placed at `uri` of docs/."""
    # Imported here, so that the functions that need no MkDocs can be used without it.
    from mkdocs.structure.files import File

    return File.generated(config, uri, abs_src_path=str(ROOT / path))


def expanded(nav: list[Any]) -> list[Any]:
    """Return the navigation with every `folder/*` replaced by the folder's pages."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            inner = {
                title: expanded(below) if isinstance(below, list) else below
                for title, below in entry.items()
            }
            found.append(inner)
        elif entry.endswith("/*"):
            found += pages_of(entry.removesuffix("/*"))
        else:
            found.append(entry)
    return found


def pages_of(name: str) -> list[str]:
    """Return the pages of a folder of docs/: README.md, those that it links to, then by name."""
    folder = DOCS / name
    index = folder / "README.md"
    names: list[str] = []
    if index.exists():
        names.append(index.name)
        names += re.findall(r"\]\(([\w.-]+\.md)", index.read_text(encoding="utf-8"))
    names += sorted(page.name for page in folder.glob("*.md"))
    return [f"{folder.name}/{page}" for page in dict.fromkeys(names) if (folder / page).exists()]


def on_config(config: Any) -> Any:
    """Fill in the navigation, and give headings GitHub's anchors."""
    config.nav = expanded(config.nav)
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slug}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside of docs/."""
    for path, uri in PAGES.items():
        files.append(copy_of(path, uri, config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with its links as MkDocs wants them.

    Adds linked files that are no pages to `files`. A link to nowhere stays as it is: MkDocs warns
    about it.
    """
    home = Path(page.file.abs_src_path).relative_to(ROOT)
    # MkDocs does not find the title of a page that begins with a comment.
    markdown = re.sub(r"\A\s*<!--.*?-->\s*", "", markdown, flags=re.S)

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

    # The content of <details> is Markdown, too.
    return LINK.sub(changed, markdown).replace("<details>", '<details markdown="1">')


def uri_of(place: str) -> str:
    """Return the path in docs/ that a file of the repository has on the site.

    It is a page, a picture of docs/, or a copy in `source/`.
    """
    if place in PAGES:
        return PAGES[place]
    inside = place.removeprefix("docs/")
    if inside != place and place.endswith((".md", *SHOWN)):
        return inside
    return f"source/{place}" if place.endswith(SHOWN) else f"source/{place}.txt"


def on_post_build(config: Any) -> None:
    """Prepare the site for reading without a network, and also from a folder.

    PluginError if a page loads anything from elsewhere.
    """
    from mkdocs.exceptions import PluginError

    # Pages that are read from a folder load the index as a script (and hide the search).
    index = Path(config.site_dir, "search", "search_index.json")
    script = f"var __index = {index.read_text(encoding='utf-8')}"
    index.with_suffix(".js").write_text(script, encoding="utf-8")
    loading = re.compile(r"<(?:script|link|img|iframe)\b[^>]*>")
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for tag in loading.findall(page.read_text(encoding="utf-8")):
            source = re.search(r'\b(?:src|href)="?((?:https?:)?//[^"\s>]+)', tag)
            if source is not None:
                raise PluginError(f"{page.relative_to(config.site_dir)} loads {source[1]}")
