"""The nouns: values and rules that all other rooms share.

Nothing here does I/O, knows a server or reads a clock. ``limits`` has the maximum sizes, ``layout``
builds every object path and catalog row, ``schema`` lists them, ``address`` parses URLs, and
``times`` parses times and spaces retries.
"""
