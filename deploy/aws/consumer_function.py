"""A consumer as a function: an example, to be replaced by what you do with an event.

``TIDELOG_HOME`` in the function's environment is the home's config string. SNS calls the function
with each notification of a topic that was created with ``--notify`` and the stack's output
``NotificationTarget``. The events that it has handled are those before the cursor of the consumer
``printer``: ``tidelog lag orders`` shows it.
"""

import sys

import tidelog
from tidelog.aws import consumer_handler


def show(event: tidelog.Event) -> None:
    """Write one line for each event into the function's log; an error lets it come again."""
    sys.stdout.write(f"{event.topic}/{event.partition}/{event.offset}: {event.value!r}\n")


handle = consumer_handler(show, name="printer")
