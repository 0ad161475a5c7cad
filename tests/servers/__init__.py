"""Real servers for the tests, each started on first use.

Kafka, DynamoDB Local, Cassandra, an S3 gateway, moto and a Spark standalone cluster. Each comes
from a package registry through the ordinary client (Maven, Go, pip), is kept in a cache folder,
listens on the loopback interface only, on a port of its own, and dies with the test process.

Promises: a server handed to a test has answered in its own protocol; its data folder is removed
when it stops; when it cannot be had, one line says which tool or file is missing and what to do.

For a test: the fixtures of `fixtures`. For a private server that a test may pause or kill:
`with kafka.running() as server: server.process.kill()`. By hand: `python -m tests.servers`.

It must not know Tidelog: nothing here imports the package under test.
"""
