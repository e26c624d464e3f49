"""Hooks of MkDocs for the documentation site (`hooks` of mkdocs.yml).

The pages are written for GitHub: a link to a file outside `docs/` is relative. On the site it leads to the repository.
"""

from __future__ import annotations

import posixpath
import re
from html import escape, unescape
from typing import Any

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_PLOT = re.compile(r'(<img [^>]*src="([^"]+\.svg)"[^>]*>)')
_HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_NAME = re.compile(r"(<(?:code|a [^>]*)>)([^<]+)(</)")
_LONG = re.compile(r"(?<![<\w./=\"-])[\w.:/]{25,}(?![^<]*>)")
# Not in an entity such as &gt;, and not in a number such as 0.5.11.
_SEPARATOR = re.compile(r"([a-z][.:/,_=-]+(?=[A-Za-z])|[a-z](?=[A-Z][a-z]))")
_TAG = re.compile(r"<[^>]+>")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Make a link that leaves the docs folder a link to the repository. Records come last in a search."""
    if page.file.src_uri.startswith("benchmarks/"):
        page.meta.setdefault("search", {})["boost"] = 0.2
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    return absolute_links(markdown, folder, config.repo_url)


def absolute_links(markdown: str, folder: str, repository: str) -> str:
    """The text with links to files outside docs/ as links to the repository, and with those to records, which are data.

    Args:
        folder: the page's, from the top of the repository.
    """

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        outside = not target.startswith("docs/")
        return f"{repository}/blob/main/{target}" if outside else match[1]

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table its column's name, for narrow screens (docs/site.css), and let long names break.

    A plot keeps its own size, in a box that scrolls (docs/site.css), and links to itself.
    """
    html = _PLOT.sub(r'<span class="plot"><a href="\2">\1</a></span>', html)
    return _TABLE.sub(lambda table: breakable(labelled(table[0])), html)


def breakable(table: str) -> str:
    """An HTML table whose names in code and in links may break after a dot, colon, slash, comma or underscore,
    and before a capital letter."""
    table = _NAME.sub(lambda name: name[1] + _SEPARATOR.sub(r"\1<wbr>", name[2]) + name[3], table)
    return _LONG.sub(lambda word: _SEPARATOR.sub(r"\1<wbr>", word[0]), table)


def labelled(table: str) -> str:
    """An HTML table with a data-label on each cell that has a column's name and a text."""
    names = [escape(unescape(_TAG.sub("", name)).strip(), quote=True) for name in _HEAD.findall(table)]

    def row(match: re.Match[str]) -> str:
        columns = iter(names)

        def cell(opening: re.Match[str]) -> str:
            name = next(columns, "")
            return f'<td data-label="{name}"{opening[1]}>' if name else opening[0]

        return re.sub(r"<td([^>]*)>", cell, match[0])

    return _ROW.sub(row, table)
