"""The command line: one file per command group, ``main`` puts them together.

Commands only translate: arguments in, a call into the library, tables or JSON lines out. Errors
become one line on standard error and an exit code from ``exit_codes``.
"""
