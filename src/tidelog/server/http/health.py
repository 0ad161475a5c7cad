"""Health checks. ``/healthz``: the process answers. ``/readyz``: store and catalog answer too."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response

from tidelog.errors import NotFoundError
from tidelog.home import Home
from tidelog.model import layout
from tidelog.server.http.errors import BusyError, encode
from tidelog.server.http.request import check_parameters

__all__ = ["Health"]

_READY_S = 1.0  # in which both must have answered


class Health:
    """Checks the home on request. Requests at the same time share one check."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pool = ThreadPoolExecutor(2, "tidelog-ready")  # of its own, as others may all hang
        self._looks: dict[str, asyncio.Future[None]] = {}

    async def alive(self, request: Request) -> Response:
        """``GET /healthz``"""
        check_parameters(request, ())
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """``GET /readyz``"""
        check_parameters(request, ())
        looks = {"store": self._look_at_store, "catalog": self._look_at_catalog}
        loop = asyncio.get_running_loop()
        for name, look in looks.items():
            before = self._looks.get(name)
            if before is None or before.done():
                self._looks[name] = loop.run_in_executor(self._pool, look)
        await asyncio.wait(self._looks.values(), timeout=_READY_S)
        wrong = [name for name, look in self._looks.items() if not _went_well(look)]
        if wrong:
            raise BusyError(
                f"home: its {' and its '.join(wrong)} did not answer within {_READY_S:g} s, or "
                "not as they should: try again"
            )
        return _json({"status": "ready"})

    def close(self) -> None:
        """Stops, without waiting for a check."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look_at_store(self) -> None:
        self._home.store.head(layout.HOME_OBJECT)

    def _look_at_catalog(self) -> None:
        if self._home.catalog.get(layout.HOME_PARTITION, layout.HOME_ROW) is None:
            raise NotFoundError("catalog: does not know the home any more")


def _went_well(look: asyncio.Future[None]) -> bool:
    return look.done() and look.exception() is None


def _json(value: dict[str, str]) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(encode(value), headers=headers, media_type="application/json")
