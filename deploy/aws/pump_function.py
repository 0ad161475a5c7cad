"""A pump as a function: records of a Kinesis stream become events of the topic ``PUMP_TOPIC``."""

import os

from tidelog.aws import pump_handler

handle = pump_handler(os.environ.get("PUMP_TOPIC", "events"))  # noqa: TID251 - a program of its own
