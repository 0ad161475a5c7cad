"""The scribe as a function: one message of its queue is one turn of maintenance.

``TIDELOG_HOME`` in the function's environment is the home's config string. For several homes, put
them into ``TIDELOG_HOMES`` and their names into the messages: ``tidelog.aws`` has the rules.
"""

from tidelog.aws import scribe_handler

handle = scribe_handler()
