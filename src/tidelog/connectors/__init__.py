"""Connectors: one folder for each system that Tidelog reads from or writes to.

A connector has a client, a source and sinks, as its system needs them. ``files`` is simple on
purpose: copy it to start a new one. ``source`` and ``sink`` define the protocols, and ``by_url``
opens an implementation by the scheme of a URL. Other packages add a source through the entry point
group ``tidelog.sources``. A connector must not know pipelines, archives or commands.
"""
