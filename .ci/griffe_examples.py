"""Docstrings end the line before an example with ``::``, as reStructuredText does; Markdown wants a fence."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<lead>.*)::\n\n(?P<code>(?:    .*\n|\n)+)", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Makes of ``Example::`` and the block below it a fenced block of Python."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value + "\n")


def _fenced(found: re.Match[str]) -> str:
    return f"**{found['lead']}**\n\n```python\n{dedent(found['code']).strip()}\n```\n\n"
