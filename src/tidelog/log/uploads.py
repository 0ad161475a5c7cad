"""Removing uploads that did not end, as a step of a sweep."""

from __future__ import annotations

from tidelog.errors import InvalidError, TidelogError
from tidelog.store.base import Store

__all__ = ["abort_uploads"]


def abort_uploads(store: Store, before_ms: int, unlisted: list[TidelogError]) -> int:
    """Remove uploads that began before a time; how many.

    ``unlisted`` gets an error where our credentials may not list or remove uploads.
    The bucket's own rule then aborts them, as the template of ``deploy/aws`` has it. No proof of an
    erasure is clean there, since parts hold events.
    """
    try:
        return store.abort_uploads(before_ms)
    except InvalidError as exc:
        unlisted.append(
            InvalidError(
                f"store `{store.url}`: uploads that did not end were not removed ({exc}): give "
                "these credentials the rights s3:ListBucketMultipartUploads and "
                "s3:AbortMultipartUpload",
                store=store.url,
            )
        )
        return 0
