"""The HTTP server: events in and out, and pages for people.

It promises that a success response means that the event is durable, that no request reaches a file
system by its path, its headers or its topic's name, and that nothing a client sends, or does not
send, takes the server down. It must not know how events are stored. It alone is asynchronous.

``run`` starts and stops it, ``app`` finds the operation of a request. ``http`` has what every
request passes, ``api`` the operations, ``console`` the pages.
"""
