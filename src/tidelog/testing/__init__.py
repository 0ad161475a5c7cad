"""The kit that Tidelog is tested with, shipped for authors of backends and applications.

- ``catalog_contract`` and ``store_contract``: what every catalog and store must do, as classes of
  pytest tests to subclass. ``stateful``: Hypothesis machines that compare them with a dict.
- ``faults``: stores and catalogs that lose requests and replies, delay, duplicate, list stale, or
  crash their caller.
- ``scheduler``: runs several actors over them, one step at a time, the same way for one seed; and a
  clock that moves only on request.

Needs ``pip install 'tidelog[testing]'``. Only tests may import it.
"""
