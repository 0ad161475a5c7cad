"""The catalog in one CQL table, on Scylla or Cassandra.

``catalog`` has the rows, ``table`` every statement, ``session`` what we know of the driver and what
its errors mean, ``tls`` the options for TLS.
"""
