"""Readers: the events of a partition, checked and in order.

``partition_reader`` follows the rows of a partition, ``run_reader`` fetches and checks the events
of a run or a journal, ``amendments`` applies updates and deletes that are not compiled yet.
"""
