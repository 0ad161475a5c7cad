"""Playback as a function: a range of times of a topic goes to the stream ``PLAYBACK_STREAM``.

Call it with ``{"topic": "events", "start": "-1h"}``; ``tidelog.aws`` has the rules.
"""

import os

from tidelog.aws import playback_handler

_stream = os.environ.get("PLAYBACK_STREAM")  # noqa: TID251 - a program of its own
handle = playback_handler(to=f"kinesis://{_stream}" if _stream else None)
