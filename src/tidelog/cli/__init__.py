"""The command line: one file in ``commands`` for each group of commands.

Commands parse arguments, call the library, and print tables or JSON lines. ``main`` has the list of
commands. An error becomes one line on standard error and an exit code, by ``output``.
"""
