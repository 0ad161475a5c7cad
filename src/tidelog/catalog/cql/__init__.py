"""The catalog in one CQL table, on Scylla or Cassandra.

``catalog`` has the rows, ``table`` every statement, ``session`` the driver and its errors, ``tls``
the options for TLS.
"""
