"""Functions of AWS Lambda: each of them makes a handler, for a module that Lambda calls.

``consumer`` reads a partition when it is notified of new events, and ``scribe`` does turns of
maintenance. The home is the one that ``TIDELOG_HOME`` names. A handler raises what fails, so Lambda
or the service that called it tries again. This room does not know how anything is stored.
"""

from __future__ import annotations

from tidelog.aws.consumer import consumer_handler
from tidelog.aws.scribe import scribe_handler

__all__ = ["consumer_handler", "scribe_handler"]
