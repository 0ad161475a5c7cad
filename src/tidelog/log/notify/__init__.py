"""Notifications: other systems learn that a partition has new events.

``notifier`` decides, debounced and never silent about the last event, and runs the thread behind a
process's producers. ``targets`` sends: a webhook, or an SNS topic.
"""
