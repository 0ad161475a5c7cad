"""Words of the command line that are kept: they must be text, which arguments need not be."""

from __future__ import annotations

import click

__all__ = ["utf8"]


def utf8(text: str) -> str:
    """The type of an option that takes no other bytes; Python hands those on as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise click.BadParameter("is not UTF-8: give text") from exc
    return text
