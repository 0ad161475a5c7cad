"""The log: topics, producers, consumers, and their upkeep.

It promises P1 to P3: what was acknowledged is stored and read in order, offsets have no holes, and
who lost a lease cannot commit. It must not know Spark, HTTP or the command line.

``topics`` creates and deletes, ``append`` commits segments and ``producer`` feeds it, ``read``
reads, ``lease`` and ``consumer`` share partitions, ``notify`` tells others, ``trim``, ``sweep`` and
``verify`` keep house. Simulations run ``append``, ``read``, ``lease``, ``trim`` and ``sweep`` as
they are, since these hold no lock and start no thread.
"""
