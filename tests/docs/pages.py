"""The project's Markdown: fenced blocks, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^( *)```(?P<language>\w*) *(?P<rest>[^\n]*)\n(?P<text>.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (run[\w ]*) -->\n\Z")
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: the file that it stands in.
        line: of its first line of text.
        language: as written behind the fence.
        title: the file that the text is of, if the fence says so.
        mark: what the comment before it says: ``"run"`` on its own, ``"run on 2 ranks"``, or nothing.
        text: without the fences.
    """

    page: Path
    line: int
    language: str
    title: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@lru_cache
def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        mark = _MARK.search(text[: fence.start()])
        title = re.search(r'title="([^"]+)"', fence["rest"])
        line = text.count("\n", 0, fence.start("text")) + 1
        found.append(
            Block(page, line, fence["language"], title[1] if title else "", mark[1] if mark else "", fence["text"])
        )
    return tuple(found)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """Where the page's links lead, those to other hosts left out."""
    for target in _LINK.findall(prose(page)):
        if not re.match(r"\w+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """The names by which the page's headings, and the objects of the API page, can be linked to."""
    text = prose(page)
    names = {_slug(heading) for heading in _HEADING.findall(text)}
    return names | set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


def _slug(heading: str) -> str:
    """As Markdown's ``toc`` and GitHub name a heading, where they agree."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)
