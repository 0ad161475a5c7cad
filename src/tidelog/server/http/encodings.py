"""Bodies that were compressed: gzip and zstd, up to the size that a plain body may have."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import pyarrow as pa

from tidelog.errors import InvalidError
from tidelog.server.http.errors import MediaTypeError, TooLargeError

__all__ = ["inflate", "is_encoded"]

_GZIP = 16 + zlib.MAX_WBITS
_PLAIN = (b"", b"identity")


def is_encoded(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a body is compressed, by its headers."""
    return headers.get(b"content-encoding", b"").strip().lower() not in _PLAIN


def inflate(headers: Mapping[bytes, bytes], body: bytes, bytes_max: int) -> bytes:
    """Return what a body was before. ``MediaTypeError``, ``TooLargeError``, ``InvalidError``."""
    kind = headers[b"content-encoding"].strip().lower()
    try:
        if kind in (b"gzip", b"x-gzip"):
            found = _gunzip(body, bytes_max)
        elif kind == b"zstd":
            with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
                found = stream.read(bytes_max + 1)
        else:
            raise MediaTypeError(
                f"body: Content-Encoding `{kind[:80].decode('latin-1')}`: give gzip, zstd or none"
            )
    except (zlib.error, OSError, EOFError, pa.ArrowException) as exc:
        raise InvalidError(f"body: is not {kind.decode()}: fix Content-Encoding") from exc
    if len(found) > bytes_max:
        raise TooLargeError(
            f"body: has more than {bytes_max} bytes when it is inflated: send it in parts",
            bytes_max=bytes_max,
        )
    return found


def _gunzip(body: bytes, bytes_max: int) -> bytes:
    """The members of a gzip file one after the other, up to one byte more than the bound."""
    found = b""
    while body and len(found) <= bytes_max:
        member = zlib.decompressobj(_GZIP)
        found += member.decompress(body, bytes_max + 1 - len(found))
        if not member.eof and len(found) <= bytes_max:
            raise EOFError("ends before its end")
        body = member.unused_data
    return found
