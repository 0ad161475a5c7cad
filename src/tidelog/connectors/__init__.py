"""Connectors: one folder for each system that Tidelog reads from or writes to.

A connector has a client, a source and sinks, as far as its system needs them; ``files`` is kept
simple for copying. ``source`` and ``sink`` are the protocols, ``sources``, ``sinks`` and
``playback_sinks`` open an implementation by the scheme of a URL. Other packages add a source by the
entry point group ``tidelog.sources``. A connector must not know pipelines, archives or commands.
"""
