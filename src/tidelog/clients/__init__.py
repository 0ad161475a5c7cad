"""Clients of other systems: what sources and sinks of the same system share.

A client module turns an address into the properties of the system's own client library, takes
secrets from the environment, and translates the library's errors into ours. It promises that a
setting which would break a promise of ours is refused with its reason. It must not know what is
read or written with it, nor anything of a home.

``kafka`` serves the Kafka source and the Kafka sink, ``kinesis`` those of Kinesis.
"""
