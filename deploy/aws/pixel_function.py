"""Pixels as a function: requests of an HTTP API become events of the topics ``PIXEL_TOPICS``."""

import os

from tidelog.aws import pixel_handler

_topics = os.environ.get("PIXEL_TOPICS", "events")  # noqa: TID251 - a program of its own
handle = pixel_handler(_topics.split(","))
