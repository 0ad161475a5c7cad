"""The front door: events over HTTP, in and out.

It promises that what it has answered is durable, that no request reaches a file system by its
path, its headers or its topic's name, and that nothing a client sends, or does not send, takes the
server down. It must not know how events are stored; it alone is asynchronous.

``run`` starts and stops it, ``connection`` is what a socket may do, ``app`` finds the way of a
request, ``gate`` says who may, ``ingest``, ``pixel``, ``read`` and ``tail`` do it, ``openapi``
describes it, and ``load`` sends sample traffic.
"""
