"""The nouns: values and rules that the rest of the house shares.

Nothing here does I/O, knows a server or reads a clock. ``limits`` says how large anything may
be, ``layout`` names every object path and catalog row, ``address`` takes URLs apart, ``backoff``
spaces repeats.
"""
