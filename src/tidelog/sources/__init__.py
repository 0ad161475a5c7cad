"""What can be read by position: Kafka, topics of a home, files.

Every source is one ``read(range)`` that gives Arrow batches in event columns and runs anywhere, on
a driver or in a Spark task; a source holds plain settings, pickles, and opens its connections
where it is used. It promises order within a source partition and that nothing is passed over in
silence. It must not know pipelines, sinks or the catalog of whoever reads it.

``base`` has the interface. Other packages may add a source by the entry point group
``tidelog.sources``.
"""
