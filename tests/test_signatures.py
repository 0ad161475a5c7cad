"""Signatures of the public API: every type in them is exported, and none of them is ``Any``."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping

import tidelog

ANY = {
    "ArchiveFormat.format_settings": "settings of formats, some of which other packages bring",
    "Event.json": "JSON, as json.loads returns it",
    "PartialAppendError.positions": "errors are below the model, which has positions",
}
"""Where ``Any`` is right, and why."""

OF_NUMPY = {"Positions.__init__"}
"""Arrays: NumPy's own type of them has an ``Any`` in some of its versions."""

NEED_NO_NAME = {
    *("Catalog", "Context", "Store", "World"),  # what a home consists of
    *("Flush", "Floors", "RangeCursor", "Rate", "TaskRunner"),  # what one call gives to another
    *("Backoff", "LogSettings"),  # parts of settings
    *("Manifest", "Piece", "Source", "SourcePartition", "SourceRange"),  # for connectors
    *("ArchiveEnd", "ForcedPromote", "Promotion", "RedoPart"),  # parts of an archive's row
}
"""Types that no program writes down."""


@functools.cache
def names_in(module: str) -> dict[str, object]:
    """What annotations in a module may name, also what is imported for type checkers only."""
    if module:
        return names_in("") | vars(sys.modules[module])
    found: dict[str, object] = dict(vars(typing))
    for name, each in sorted(sys.modules.items()):
        if name.partition(".")[0] == "tidelog":
            found |= {own: vars(each).get(own) for own in getattr(each, "__all__", ())}
    return found | {own: getattr(tidelog, own) for own in tidelog.__all__}


def types_of(annotations: Mapping[str, object], module: str) -> dict[str, object]:
    holder = type("Holder", (), {"__annotations__": dict(annotations)})
    return typing.get_type_hints(holder, names_in(module), names_in(module))


def function_of(member: object) -> object:
    for name in ("fget", "func", "__func__"):  # of properties, and of class methods
        member = getattr(member, name, member)
    return member


@functools.cache
def signatures() -> list[tuple[str, object]]:
    """The types of parameters, results and fields of all that is public."""
    return list(_signatures())


def _signatures() -> Iterator[tuple[str, object]]:
    for name in tidelog.__all__:
        found = getattr(tidelog, name)
        members = {"": found}
        for base in reversed(inspect.getmro(found) if inspect.isclass(found) else ()):
            if base.__module__.startswith("tidelog"):
                fields = types_of(vars(base).get("__annotations__", {}), base.__module__)
                public = [(own, each) for own, each in fields.items() if not own.startswith("_")]
                yield from ((f"{name}.{own}", each) for own, each in public)
                members |= {f".{own}": member for own, member in vars(base).items()}
        for own, member in members.items():
            call = function_of(member)
            if inspect.isfunction(call) and (not own.startswith("._") or own == ".__init__"):
                for each in types_of(call.__annotations__, call.__module__).values():
                    yield f"{name}{own}", each


def parts(hint: object) -> Iterator[object]:
    yield hint
    for each in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from parts(each)


def test_public_signatures_have_no_any() -> None:
    found = {name for name, hint in signatures() if typing.Any in list(parts(hint))}
    assert found - OF_NUMPY == set(ANY), "use the type, or object"


def test_types_in_public_signatures_are_exported() -> None:
    exported = {getattr(tidelog, name) for name in tidelog.__all__}
    found = {
        each.__name__
        for name, hint in signatures()
        if not name.endswith("__init__")  # the library makes most of these objects
        for each in parts(hint)
        if inspect.isclass(each) and each.__module__.startswith("tidelog") and each not in exported
    }
    assert found == NEED_NO_NAME, "export it: people annotate their own functions with it"
