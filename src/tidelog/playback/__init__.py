"""Playback: any time range of a topic, in the order of its events, to another place.

This room keeps promise P6: every event of ``[start, end)`` once, by time, up to the ends that the
topic had at the start. Stopped and resumed by name, a playback skips nothing, and repeats nothing
into a topic. ``request`` finds runs by time, ``merge`` yields their events in order, ``play`` puts
them into a sink, and ``session`` stores the progress of a named playback. ``pages`` reads and
searches a topic piece by piece for clients. It must not know Spark or commands.
"""
