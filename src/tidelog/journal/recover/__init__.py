"""Recovery: appends events of objects that the catalog has lost.

Use it after a catalog was restored from an older copy. ``stray_events`` reads what such objects
contain, ``lost_topics`` finds topics without a registry row, ``recover`` appends each event once.
"""
