"""Compile: turns many runs into one journal, with amendments applied. Offsets do not change.

``policy`` chooses neighboring rows, ``build`` writes journals from them, ``swap`` replaces the rows
in one write, and ``compile`` runs these steps for a partition or a topic.
"""
