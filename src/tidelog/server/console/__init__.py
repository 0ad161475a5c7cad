"""The console: pages for people at ``/`` of the server, made here, with a little script beside.

``site`` answers requests, ``session`` says who may, ``sampler`` keeps the figures that pages show,
and each other module is one subject: topics, events, consumers, archives, tokens. Pages read what
the sampler has, so that a home with a thousand topics is shown as fast as one with ten.
"""
