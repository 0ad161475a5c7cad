"""Settings: where the home is and how the product behaves.

A flag wins over the environment, which wins over ``tidelog.toml``. An unknown setting is refused
with the nearest known name, and so are settings that contradict each other. Nothing is read at
import.

The *config string* ``tidelog:?store=…&catalog=…`` is all that a producer or a consumer needs to
open a home. It never contains a secret: addresses with one are refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import limits
from tidelog.model.address import nearest, parse_address
from tidelog.model.times import Backoff

__all__ = [
    "DEFAULT_FOLDER",
    "FILE_NAME",
    "LogSettings",
    "Settings",
    "check_options",
    "config_string",
    "load_settings",
]

DEFAULT_FOLDER = "tidelog-data"
FILE_NAME = "tidelog.toml"
_PREFIX = "TIDELOG_"
_CONFIG_SCHEME = "tidelog:"
_SECRETS = (  # read by their backends, from the environment alone
    "CQL_PASSWORD",
    "CQL_SSL_KEY_PASSWORD",
    "CQL_USERNAME",
    "HTTP_TOKEN",
    "KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET",
    "KAFKA_SASL_OAUTHBEARER_TOKEN_ENDPOINT_URL",
    "KAFKA_SASL_PASSWORD",
    "KAFKA_SSL_KEYSTORE_PASSWORD",
    "KAFKA_SSL_KEY_PASSWORD",
    "KAFKA_SSL_KEY_PEM",
    "NOTIFY_LOCAL",
    "NOTIFY_SECRET",
    "SCYLLA_PASSWORD",
    "SCYLLA_SSL_KEY_PASSWORD",
    "SCYLLA_USERNAME",
)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How the log behaves, as plain values."""

    linger_ms: int = 5  # how long a producer collects events before it flushes
    segment_bytes: int = 8 << 20  # a flush of this size does not wait longer
    buffer_bytes: int = 64 << 20  # limit of a producer's buffer; a full one blocks
    event_bytes_max: int = limits.EVENT_BYTES_MAX  # larger events are refused
    lease_ttl_ms: int = 10_000  # a consumer or driver silent for longer loses its partitions
    max_poll_interval_ms: int = 300_000  # a handler slower than this loses its leases

    @property
    def dead_after_s(self) -> float:
        """Returns how long to look at a row without a heartbeat before its owner counts as dead."""
        return 1.5 * self.lease_ttl_ms / 1000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < (0 if name == "linger_ms" else 1):
                raise InvalidError(f"setting {name}: is {getattr(self, name)}: give more than that")
        if self.segment_bytes > self.buffer_bytes:
            raise InvalidError(
                f"settings segment_bytes {self.segment_bytes} and buffer_bytes {self.buffer_bytes} "
                "contradict each other: a buffer holds at least one segment"
            )
        if self.event_bytes_max > min(self.buffer_bytes, limits.EVENT_BYTES_CEILING):
            raise InvalidError(
                f"setting event_bytes_max: is {self.event_bytes_max}: at most buffer_bytes, "
                f"and at most {limits.EVENT_BYTES_CEILING}"
            )


_LOG = LogSettings()


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, as plain values that pickle, so that they reach Spark's executors."""

    store: str  # URL or path of the object store
    catalog: str  # URL or path of the catalog
    found_in: str = "arguments"  # for people: where the home's address came from
    is_default: bool = False  # the default home is created on first use, others by `init`
    retry_attempts: int = 8  # attempts of one request, including the first
    retry_base_ms: int = 50  # the first wait between attempts
    retry_max_ms: int = 5_000  # the longest wait between attempts
    retry_total_ms: int = 30_000  # no attempt starts later than this after the first one
    cache_bytes: int = 64 << 20  # shared by the readers of a process; a few segments of 8 MiB

    linger_ms: int = -1  # how long a producer collects; -1: 5 for a folder, 250 for a remote store
    segment_bytes: int = _LOG.segment_bytes  # a flush of this size does not wait longer
    buffer_bytes: int = _LOG.buffer_bytes  # limit of a producer's buffer; a full one blocks
    event_bytes_max: int = _LOG.event_bytes_max  # larger events are refused
    lease_ttl_ms: int = _LOG.lease_ttl_ms  # silent for longer: loses its partitions
    max_poll_interval_ms: int = _LOG.max_poll_interval_ms  # a slower handler loses its leases

    def __post_init__(self) -> None:
        self.backoff()
        self.log_settings(remote=False)
        if self.cache_bytes < 0:
            raise InvalidError(f"setting cache_bytes: is {self.cache_bytes}: give 0 or more")
        schemes = {self._scheme("store", "file"), self._scheme("catalog", "sqlite")}
        if "memory" in schemes and len(schemes) > 1:
            raise InvalidError(
                f"settings store `{self.store}` and catalog `{self.catalog}` contradict: "
                "one is gone with the process, the other stays: keep both in memory, or neither"
            )

    def backoff(self) -> Backoff:
        """Returns how retries are spaced."""
        return Backoff(
            self.retry_attempts, self.retry_base_ms, self.retry_max_ms, self.retry_total_ms
        )

    def log_settings(self, remote: bool) -> LogSettings:
        """Returns the log's settings, for a remote store or for this machine."""
        if self.linger_ms < -1:
            raise InvalidError(f"setting linger_ms: is {self.linger_ms}: give 0 or more, or -1")
        usual_ms = 250 if remote else 5
        return LogSettings(
            linger_ms=usual_ms if self.linger_ms == -1 else self.linger_ms,
            segment_bytes=self.segment_bytes,
            buffer_bytes=self.buffer_bytes,
            event_bytes_max=self.event_bytes_max,
            lease_ttl_ms=self.lease_ttl_ms,
            max_poll_interval_ms=self.max_poll_interval_ms,
        )

    def _scheme(self, name: str, plain: str) -> str:
        text = getattr(self, name)
        if not text:
            raise InvalidError(f"setting {name}: is empty: give a URL or a path")
        return parse_address(text, plain_scheme=plain).scheme


def load_settings(home: str | None, environ: Mapping[str, str], folder: Path) -> Settings:
    """Returns the settings for a home: a path, a config string, ``memory:``, or None to look for
    one.

    ``folder`` is the base of relative paths and of the default home.
    """
    given = _from_environ(environ)
    text = home if home is not None else given.pop("home", None)
    if text is not None:
        if home is None and (given.keys() & {"store", "catalog"}):
            raise InvalidError(
                "environment: TIDELOG_HOME and TIDELOG_STORE or TIDELOG_CATALOG contradict each "
                "other: set the one or the other two"
            )
        for name in ("home", "store", "catalog"):
            given.pop(name, None)
        said_by = "--home" if home is not None else "TIDELOG_HOME"
        return _build({**_from_text(text, folder, said_by), **given})
    file = folder / FILE_NAME
    values = _from_file(file) if file.exists() else {}
    if given.keys() & {"store", "catalog"}:
        values["found_in"] = "environment"
    values.update(given)
    if not values.keys() & {"store", "catalog"}:
        values.update(_of_folder(folder / DEFAULT_FOLDER), found_in="default", is_default=True)
    return _build(values)


def check_options(
    what: str, given: Mapping[str, Any], known: type, named: Iterable[str] = (), others: str = ""
) -> None:
    """Raises ``InvalidError`` for an option that a ``TypedDict`` does not have.

    Python itself does not check keyword arguments that such a type describes. ``named`` are those
    that the caller has by name, and ``others`` says more about arguments.
    """
    for name in given:
        if name not in known.__annotations__:
            every = sorted([*known.__annotations__, *named])
            options = ", ".join([*filter(None, [others]), *every])
            raise InvalidError(
                f"{what}: unknown option `{name}`{nearest(name, every)}: give one of {options}"
            )


def config_string(store_url: str, catalog_url: str) -> str:
    """Returns the string that opens a home anywhere."""
    return f"{_CONFIG_SCHEME}?{urlencode({'store': store_url, 'catalog': catalog_url}, safe=':/')}"


def _from_text(text: str, folder: Path, said_by: str) -> dict[str, Any]:
    if text.startswith(_CONFIG_SCHEME):
        return {**_from_config_string(text), "found_in": f"config string of {said_by}"}
    if text == "memory:":
        return {"store": text, "catalog": text, "found_in": said_by}
    if not text:
        raise InvalidError(f"{said_by}: is empty: give a folder or a config string")
    shape = f"give a folder, a {FILE_NAME}, or a config string tidelog:?store=…&catalog=…"
    if "://" in text:
        raise InvalidError(f"{said_by} `{text}`: a home is two addresses: {shape}")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
        raise InvalidError(f"{said_by} `{text}`: looks like a URL, and is none: {shape}")
    path = (folder / text).absolute()
    try:
        is_file, has_file = path.is_file(), (path / FILE_NAME).exists()
    except OSError as exc:  # too long, or without the right to look
        raise InvalidError(f"{said_by} `{text[:200]}`: {exc.strerror}: {shape}") from exc
    if path.suffix != ".toml" and is_file:
        raise InvalidError(f"{said_by} `{text}`: is a file: {shape}")
    if path.suffix == ".toml" or has_file:
        file = path if path.suffix == ".toml" else path / FILE_NAME
        return _from_file(file)
    return {**_of_folder(path), "found_in": said_by}


def _from_config_string(text: str) -> dict[str, Any]:
    shape = "tidelog:?store=URL&catalog=URL"
    wrong = InvalidError(
        f"config string `{text}`: must name one store and one catalog: give {shape}"
    )
    mark, query = text[len(_CONFIG_SCHEME) :][:1], text[len(_CONFIG_SCHEME) + 1 :]
    if mark != "?":
        raise wrong
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as exc:
        raise InvalidError(f"config string: not well formed: give {shape}") from exc
    values = dict(pairs)
    for name in values:
        if name not in ("store", "catalog"):
            raise InvalidError(
                f"config string: unknown part `{name}`{nearest(name, ('store', 'catalog'))}: "
                f"give {shape}"
            )
    if len(pairs) != 2 or set(values) != {"store", "catalog"}:
        raise wrong
    return values


def _from_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text())
    except FileNotFoundError as exc:
        raise NotFoundError(
            f"settings file `{file}`: not found: create it, or fix the path"
        ) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidError(f"settings file `{file}`: cannot be read: {exc}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise InvalidError(f"settings file `{file}`: {exc}: write it as TOML") from exc
    kinds = _kinds()
    for name, value in values.items():
        if name not in kinds:
            raise _unknown(f"settings file `{file}`", name, kinds)
        if type(value) is not kinds[name]:
            raise InvalidError(
                f"settings file `{file}`: {name} is {value!r}: give {_wanted(kinds[name])}"
            )
    for name in ("store", "catalog"):
        if name in values and "://" not in values[name] and not values[name].startswith("memory:"):
            values[name] = str(file.absolute().parent / values[name])
    return {**values, "found_in": str(file)}


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    kinds: dict[str, type] = {**_kinds(), "home": str}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable[len(_PREFIX) :] in _SECRETS:
            continue
        name = variable[len(_PREFIX) :].lower()
        if name not in kinds:
            names = [_PREFIX + known.upper() for known in (*kinds, *_SECRETS)]
            raise InvalidError(
                f"environment: unknown variable {variable}{nearest(variable, names)}: "
                "unset it, or fix its name"
            )
        try:
            values[name] = kinds[name](text)
        except ValueError as exc:
            raise InvalidError(
                f"environment: {variable} is `{text}`: give {_wanted(kinds[name])}"
            ) from exc
    return values


def _of_folder(folder: Path) -> dict[str, Any]:
    """Returns where a home in a folder keeps its two halves."""
    return {"store": str(folder / "objects"), "catalog": str(folder / "catalog.sqlite")}


def _build(values: dict[str, Any]) -> Settings:
    for name, other in (("store", "catalog"), ("catalog", "store")):
        if name not in values:
            raise InvalidError(f"settings: {other} is given but {name} is not: give both")
    return Settings(**values)


def _kinds() -> dict[str, type]:
    """Returns the settings that a file or the environment may set, with their types."""
    settable = [f for f in fields(Settings) if f.name not in ("found_in", "is_default")]
    return {f.name: {"str": str, "int": int}[str(f.type)] for f in settable}


def _wanted(kind: type) -> str:
    return "a whole number" if kind is int else "text"


def _unknown(where: str, name: str, known: Mapping[str, type]) -> InvalidError:
    return InvalidError(
        f"{where}: unknown setting `{name}`{nearest(name, known)}: it takes {', '.join(known)}"
    )
