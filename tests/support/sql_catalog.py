"""Iceberg's catalogs in SQL, as readers of tables open them in tests."""

from __future__ import annotations

import weakref

from pyiceberg.catalog import Catalog, load_catalog

__all__ = ["open_sql_catalog"]


def open_sql_catalog(uri: str, name: str = "tidelog") -> Catalog:
    """A catalog whose connections are closed when nothing refers to it any more."""
    catalog = load_catalog(name, uri=uri)
    weakref.finalize(catalog, catalog.engine.dispose)  # type: ignore[attr-defined]
    return catalog
