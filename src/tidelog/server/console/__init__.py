"""The console: pages for people at ``/`` of the server, made here, with a little script beside.

``site`` answers requests, ``session`` says who may and has the pages of tokens, ``sampler`` keeps
the figures that pages show, and ``format`` formats them. ``topics`` (with consumers), ``events``,
``journals`` and ``archives`` have the pages of their subjects, ``forms`` and ``actions`` change
something, and ``jobs`` runs what takes longer than a request. Pages read what the sampler has, so
that a home with a thousand topics is shown as fast as one with ten.
"""
