"""Notifications: tell other systems that a partition has new events.

``notifier`` decides when to send, and runs the thread that does it for a process's producers. It
debounces, but never skips the last event. ``targets`` sends to a webhook or an SNS topic.
"""
