"""Compile: many runs become one journal, with amendments applied; offsets stay as they are.

``policy`` chooses neighbouring rows, ``build`` writes journals from them, ``swap`` replaces the
rows in one write, and ``compile`` runs these steps for a partition or a topic.
"""
