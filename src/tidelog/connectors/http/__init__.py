"""HTTP: a playback sink.

Each lot is one POST of JSON lines, retried until the server responds. A repeated lot has the same
number.
"""
