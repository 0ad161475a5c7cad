"""Where pipelines write: files of an archive, and later topics, Kafka, Kinesis, HTTP.

A sink stages what a range produces and publishes it when the pipeline has recorded a manifest. It
promises that publishing twice, or by two drivers at once, publishes once, and that nothing that is
only staged can be seen. It must not know sources, pipelines or the catalog.

``base`` has the interface, ``publish`` copies staged files to their final names.
"""
