"""Benchmarks: speed beside a peer in the same run, as a table and as JSON.

``python -m bench`` runs all suites, ``python -m bench ground`` one of them. Machines are noisy, so
what counts is the ratio to the peer, measured in alternating slices; figures of another day do not
compare. Results go to ``bench/results/<suite>.json``.
"""
