"""A token of the server: what it may do, and the hash by which it is known."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

from tidelog.errors import InvalidError
from tidelog.model.decoding import Persisted

__all__ = ["LABEL_MAX", "Scope", "Token", "check_token_id", "token_hash"]

Scope = Literal["read", "write"]
LABEL_MAX = 200  # characters
_ID = re.compile(r"[0-9a-f]{12}")


class Token(Persisted, frozen=True):
    """What the home keeps of a token. Its text is shown once, and stored nowhere."""

    id: str
    sha256: str  # of the whole text, in hexadecimal digits; the secret in it has 256 random bits
    scopes: tuple[Scope, ...]
    created_ms: int
    label: str = ""


def token_hash(text: bytes) -> str:
    """What a token is known by. A plain hash will do, as nobody can guess 256 random bits."""
    return hashlib.sha256(text).hexdigest()


def check_token_id(token_id: str) -> None:
    """Refuse what is no id of a token, such as the token's own text."""
    if not _ID.fullmatch(token_id):
        raise InvalidError(
            "token id: is no 12 hexadecimal digits: give the id that `tidelog token list` shows, "
            "not the token"
        )
