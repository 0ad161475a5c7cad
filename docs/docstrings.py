"""Docstrings as Markdown: an extension of Griffe, which reads them for mkdocstrings.

Ours name things as Sphinx does and show examples as a Python prompt does. Markdown would print the
former as they are and take the latter for quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
PROMPT = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)
LITERAL = re.compile(r"::\n\n((?:(?:    .*)?\n?)+)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    text = ROLE.sub(r"`\1`", text)
    return PROMPT.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
