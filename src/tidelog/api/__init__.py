"""The parts of ``Home``: archives, pumps, playbacks and consumers, as Python code uses them.

Each part is a list of things with names (``home.archives``, ``home.pumps``) and a handle for one of
them. They take plain values, call the rooms below, and return values. They print nothing and know
neither the command line nor the server, which call them through ``Home``.
"""
