"""The log: topics, producers, consumers, and their maintenance.

It promises P1 to P3: what was acknowledged is stored and read in order, offsets have no holes, and
a member that lost its lease cannot commit. It must not know Spark, HTTP or the command line.

``topics`` creates and deletes topics; ``producer`` writes events and ``partition_reader`` reads
them; ``consumer`` shares partitions between members; ``notifier`` informs other systems;
``maintenance`` trims, sweeps and verifies. ``unused_objects`` has the rows by which writers list
objects for the sweep. Simulations run the protocols as they are, since appends, reads, leases,
trims and sweeps hold no lock and start no thread.
"""
