"""What the documentation says is so: its code runs, its links lead somewhere, the messages that it explains exist."""

from __future__ import annotations

import ast
import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Block, anchors, blocks, links, prose
from tests.helpers.pool import Pool
from tests.helpers.sources import trees_in

ALL = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in ALL if block.mark == "run"]
ON_RANKS = [block for block in ALL if block.mark == "run on 2 ranks"]
MESSAGES = [block for block in blocks(ROOT / "docs/troubleshooting.md") if block.language == "text"]
FOLDERS = "lightning_par|tests|examples|docs"


def _run(block: Block) -> None:
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), {"__name__": "a page"})


@pytest.mark.parametrize("block", RUN, ids=str)
def test_code_runs(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")  # which a Trainer takes that isn't told one
    _run(block)


@pytest.mark.parametrize("block", ON_RANKS, ids=str)
def test_code_runs_on_ranks(block: Block, pool: Pool) -> None:
    pool.run(2, _run, block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_can_be_read(page: Path) -> None:
    assert all(block.mark in ("", "run", "run on 2 ranks") for block in blocks(page))
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", prose(page)))
    named |= {
        word
        for command in re.findall(r"`((?:python|grep) [^`]*)`", prose(page))
        for word in shlex.split(command)
        if re.match(rf"({FOLDERS})/", word)
    }
    new = {"lightning_par/expert/", "tests/expert/"}  # those that the worked example of an axis makes
    assert not [path for path in sorted(named - new) if not (ROOT / path).exists()]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@lru_cache
def _texts() -> tuple[str, ...]:
    """The string literals of the sources but for docstrings, ``…`` for what is put into them."""
    nodes = [node for tree in trees_in(ROOT / "lightning_par").values() for node in ast.walk(tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [
        _text(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings
    ]
    return tuple(" ".join(text.split()) for text in texts)


def _text(node: Any) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def _holds(text: str, pieces: list[str]) -> bool:
    """Whether ``text`` has the pieces, in this order."""
    place = 0
    for piece in pieces:
        found = text.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    return True


@pytest.mark.parametrize("block", MESSAGES, ids=str)
def test_a_message_that_is_explained_exists(block: Block) -> None:
    pieces = [piece.strip() for piece in " ".join(block.text.split()).split("…")]
    assert any(len(piece) > 12 for piece in pieces), "no part of it is fixed"
    assert any(_holds(text, pieces) for text in _texts()), f"no message of the sources reads\n{block.text}"
