"""Recovery: events of objects that the catalog has forgotten are appended again.

For catalogs that were restored from an older copy. ``stray_events`` reads what such objects hold,
``lost_topics`` finds topics without a registry row, ``recover`` appends each event once.
"""
