"""Functions of AWS Lambda: each of them makes a handler, for a module that Lambda calls.

``consumer`` reads a partition when it is notified of new events. A handler opens the home that
``TIDELOG_HOME`` names at its first call, and keeps it for the next ones. It raises what fails, so
Lambda or the service that called it tries again. This room does not know how anything is stored.
"""

from __future__ import annotations

from tidelog.aws.consumer import consumer_handler

__all__ = ["consumer_handler"]
