"""Times in a field of a Protocol Buffers message: numbers, text, or ``google.protobuf.Timestamp``.

A file describes the message, made by ``protoc --descriptor_set_out=FILE --include_imports``. A
number without field presence counts as missing when it is 0: the wire format cannot tell the two
apart, and 1970 would be a guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidelog.codec.parsers.base import Spec, TimeParser, shown
from tidelog.codec.parsers.folders import Decode, decoded_times, time_text
from tidelog.errors import InvalidError
from tidelog.model.address import nearest

__all__ = ["open_protobuf"]

_TIMESTAMP = "google.protobuf.Timestamp"
_WHOLE = ("INT", "UINT", "SINT", "FIXED", "SFIXED")
_TIMESTAMP_FILE = "google/protobuf/timestamp.proto"


def open_protobuf(spec: Spec) -> TimeParser:
    """Opens ``protobuf:FIELD?descriptor=FILE&message=package.Name``; FIELD is ``outer.inner``."""
    argument, options = spec.with_options(["descriptor", "message"])
    if len(options) != 2:
        raise spec.refused("needs both: give ?descriptor=FILE&message=package.Name")
    path = spec.path(argument)
    what = f"field `{shown(argument)}`"
    try:
        message = _message(options["descriptor"], options["message"])
        return decoded_times(_decoder(message, path, what), what)
    except InvalidError as exc:
        raise spec.refused(str(exc)) from exc
    except ImportError as exc:
        raise spec.refused("Protobuf is not installed: pip install 'tidelog[formats]'") from exc


def _message(file: str, name: str) -> Any:
    """Returns the descriptor of a message in a set of files."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message, timestamp_pb2  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

    try:
        described = descriptor_pb2.FileDescriptorSet.FromString(Path(file).read_bytes())
    except OSError as exc:
        raise InvalidError(f"descriptor file `{file}` cannot be read ({exc})") from exc
    except message.DecodeError as exc:
        raise InvalidError(
            f"descriptor file `{file}` is not a valid descriptor set: create it with protoc"
        ) from exc
    files = {each.name: each for each in described.file}
    if _TIMESTAMP_FILE not in files:
        own = descriptor_pb2.FileDescriptorProto()
        timestamp_pb2.DESCRIPTOR.CopyToProto(own)
        files[_TIMESTAMP_FILE] = own
    pool = descriptor_pool.DescriptorPool()
    for each in _in_order(files):
        try:
            pool.Add(each)
        except TypeError as exc:
            raise InvalidError(
                f"descriptor file `{file}` is not whole ({shown(str(exc))}): "
                "make it by protoc --include_imports"
            ) from exc
    try:
        return pool.FindMessageTypeByName(name)
    except KeyError as exc:
        known = [
            f"{f.package}.{m.name}".lstrip(".") for f in described.file for m in f.message_type
        ]
        raise InvalidError(
            f"descriptor file `{file}` has no message `{name}`{nearest(name, known)}"
        ) from exc


def _in_order(files: dict[str, Any]) -> list[Any]:
    """Returns files after those that they import."""
    ordered: dict[str, Any] = {}
    while len(ordered) < len(files):
        waiting = [name for name in files if name not in ordered]
        ready = [
            name
            for name in waiting
            if all(each in ordered or each not in files for each in files[name].dependency)
        ]
        ordered.update((name, files[name]) for name in ready or waiting)
    return list(ordered.values())


def _decoder(descriptor: Any, path: tuple[str, ...], what: str) -> Decode:
    from google.protobuf import message, message_factory  # noqa: PLC0415 - an extra

    parsed = message_factory.GetMessageClass(descriptor).FromString
    *outer, last = _steps(descriptor, path)
    is_stamp = last.message_type is not None
    has_presence = last.has_presence

    def decode(value: bytes) -> str:
        try:
            record = parsed(value)
        except message.DecodeError as exc:
            raise InvalidError(f"value is not Protobuf of its message: {shown(str(exc))}") from exc
        for step in outer:
            if not record.HasField(step.name):
                raise InvalidError(f"{what} is missing or null")
            record = getattr(record, step.name)
        if has_presence and not record.HasField(last.name):
            raise InvalidError(f"{what} is missing or null")
        found = getattr(record, last.name)
        if is_stamp:
            return f"{found.seconds}.{max(found.nanos, 0) // 1_000_000:03}"
        if not (has_presence or found):
            raise InvalidError(f"{what} is missing or 0")
        return time_text(found, what)

    return decode


def _steps(descriptor: Any, path: tuple[str, ...]) -> list[Any]:
    """Returns the descriptors along a path. Raises ``InvalidError`` unless it leads to a time."""
    steps = []
    for name in path:
        known = {} if descriptor is None else descriptor.fields_by_name
        if name not in known:
            raise InvalidError(f"the message has no field `{name}`{nearest(name, known)}")
        steps.append(known[name])
        if steps[-1].is_repeated:
            raise InvalidError(f"field `{name}` is repeated: give one that an event has once")
        descriptor = steps[-1].message_type
    last = steps[-1]
    is_stamp = last.message_type is not None and last.message_type.full_name == _TIMESTAMP
    if not (is_stamp or last.type in _timely(last)):
        raise InvalidError(
            f"field `{last.name}` is not a valid time: give a number, text or {_TIMESTAMP}"
        )
    return steps


def _timely(field: Any) -> set[int]:
    """Returns the types that can hold a time."""
    whole = {f"TYPE_{kind}{bits}" for kind in _WHOLE for bits in (32, 64)}
    return {getattr(field, name) for name in whole | {"TYPE_DOUBLE", "TYPE_FLOAT", "TYPE_STRING"}}
