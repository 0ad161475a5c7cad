"""Erasure: deletes events from archives too, and proves it by searching every byte.

This room keeps promise P5a: a proof is clean only if no object, name, manifest, table, staged file
or row holds the erased event or its id. What a proof cannot see, it lists. It must not know HTTP or
commands.

``delete`` deletes events of a topic, ``delete_archived`` those that only archives hold, and
``event_search`` finds them by id or key. ``rewrite`` replaces files by ones without the events,
``matcher`` recognizes erased events in any column or line, ``redaction`` removes their ids from
texts of the catalog. ``proof_scope`` and ``archive_scope`` say what belongs to a topic or an
archive, ``proof_search`` searches it object by object (``object_search``), and ``proof`` has the
verdict. The steps of a whole erasure are in ``maintenance.erase``.
"""
