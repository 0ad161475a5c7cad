"""What every request passes: connections, limits, authority, errors and metrics.

``connection`` bounds what a socket may do, ``auth`` decides who may do what, ``limits`` what a
client may take, ``errors`` maps every error to a status and one JSON shape.
"""
