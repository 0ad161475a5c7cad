"""Playback: any range of times of a topic, in the order of its events, to another place.

It promises P6: every event of ``[start, end)`` once, by time, up to the ends that the topic had
when it began; stopped and resumed by its name, it skips nothing, and repeats nothing into a topic.
``slots`` finds runs by time, ``merge`` yields their events in order, ``play`` puts them into a
sink, and ``session`` keeps how far a playback with a name has come. It must not know Spark or
commands.
"""
