"""HTTP: a place to play events to.

Each lot is one POST of JSON lines, retried until it is answered.
A target that repeats a lot sees the same number again.
"""
