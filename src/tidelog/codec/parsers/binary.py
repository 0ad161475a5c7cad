"""Times in a field of a binary record: MessagePack, Protocol Buffers or Thrift.

A time is a number, a text, or the encoding's own type of times.

**Protocol Buffers.** A file describes the message, made by ``protoc --descriptor_set_out=FILE
--include_imports``. A number without field presence counts as missing when it is 0: the wire format
cannot tell the two apart, and 1970 would be a guess.

**Thrift** needs no schema: a field is named by its id. Only the struct's own fields are read:
whatever comes before the wanted one is skipped, however deep it is, and nothing after it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

import msgspec

from tidelog.codec.parsers.base import Spec, TimeParser, shown
from tidelog.codec.parsers.folders import Decode, decoded_times, field_text, time_text
from tidelog.errors import InvalidError
from tidelog.model.address import nearest
from tidelog.model.decoding import check_msgpack_depth

__all__ = [
    "open_msgpack",
    "open_protobuf",
    "open_thrift",
]


def open_msgpack(spec: Spec) -> TimeParser:
    """Opens ``msgpack:FIELD``; a field inside maps is ``outer.inner``."""
    path = spec.path(spec.argument)
    what = f"field `{shown(spec.argument)}`"
    decoder = msgspec.msgpack.Decoder()

    def decode(value: bytes) -> str:
        check_msgpack_depth(value, "value is not MessagePack")
        try:
            record = decoder.decode(value)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as exc:
            raise InvalidError(f"value is not MessagePack: {shown(str(exc))}") from exc
        return field_text(record, path, what)

    return decoded_times(decode, what)


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


# Structs, lists and maps inside each other; Thrift's own readers have the same limit.
_DEPTH_MAX = 64
_SHORT, _INT, _LONG = Struct(">h"), Struct(">i"), Struct(">q")


def open_thrift(spec: Spec) -> TimeParser:
    """Opens ``thrift:3``: the field with id 3, an i64 or i32.

    ``?protocol=compact`` selects the compact protocol; the default is binary.
    """
    argument, options = spec.with_options(["protocol"])
    wanted = spec.number(argument, 32_767, "no field id: give a number from 1 on")
    protocol = options.get("protocol", "binary")
    readers: dict[str, Callable[[bytes, int], int]] = {
        "binary": _binary_field,
        "compact": _compact_field,
    }
    if protocol not in readers:
        raise spec.refused(f"protocol `{protocol}` is not known: give binary or compact")
    read = readers[protocol]

    def decode(value: bytes) -> str:
        try:
            return str(read(value, wanted))
        except (IndexError, OverflowError) as exc:
            raise InvalidError(f"value is not Thrift's {protocol} protocol: it ends early") from exc

    return decoded_times(decode, f"field {wanted}")


# The binary protocol: a type byte, a big-endian id of two bytes, then the value.

_SIZES = {2: 1, 3: 1, 4: 8, 6: 2, 8: 4, 10: 8, 16: 16}  # bool, i8, double, i16, i32, i64, uuid
_STRING, _STRUCT, _MAP, _SET, _LIST = 11, 12, 13, 14, 15


def _binary_field(data: bytes, wanted: int) -> int:
    place = 0
    while kind := data[place]:
        found = int(_unpack(_SHORT, data, place + 1))
        place += 3
        if found == wanted:
            if kind not in (8, 10):
                raise InvalidError(f"field {wanted} is not an i64 or i32")
            return _unpack(_LONG if kind == 10 else _INT, data, place)
        place = _binary_skip(data, place, kind, 0)
    raise InvalidError(f"field {wanted} is missing or null")


def _binary_skip(data: bytes, place: int, kind: int, depth: int) -> int:
    """Returns where the value that begins at ``place`` ends."""
    if depth > _DEPTH_MAX:
        raise InvalidError("value is not Thrift's binary protocol: it is nested too deep")
    if kind in _SIZES:
        return _within(data, place + _SIZES[kind])
    if kind == _STRING:
        return _within(data, place + 4 + _count(data, place))
    if kind == _STRUCT:
        while inner := data[place]:
            place = _binary_skip(data, place + 3, inner, depth + 1)
        return place + 1
    if kind == _MAP:
        kinds: tuple[int, ...] = (data[place], data[place + 1])
        count, place = _count(data, place + 2), place + 6
    elif kind in (_SET, _LIST):
        kinds, count, place = (data[place],), _count(data, place + 1), place + 5
    else:
        raise InvalidError(f"value is not Thrift's binary protocol: it has the type {kind}")
    if all(each in _SIZES for each in kinds):
        return _within(data, place + count * sum(_SIZES[each] for each in kinds))
    for _ in range(count):
        for each in kinds:
            place = _binary_skip(data, place, each, depth + 1)
    return place


def _count(data: bytes, place: int) -> int:
    """Returns a length; never longer than the data, since every element takes at least a byte."""
    return _bounded(data, _unpack(_INT, data, place))


# The compact protocol: the id's step and the type in one byte, numbers as zigzag varints.

_C_TRUE, _C_FALSE, _C_BYTE, _C_I16, _C_I32, _C_I64, _C_DOUBLE, _C_BINARY = range(1, 9)
_C_LIST, _C_SET, _C_MAP, _C_STRUCT, _C_UUID = range(9, 14)
_C_SIZES = {_C_BYTE: 1, _C_DOUBLE: 8, _C_UUID: 16}


def _compact_field(data: bytes, wanted: int) -> int:
    place, last = 0, 0
    while head := data[place]:
        kind, last, place = _compact_head(data, place, head, last)
        if last == wanted:
            if kind not in (_C_I32, _C_I64):
                raise InvalidError(f"field {wanted} is not an i64 or i32")
            return _zigzag(_varint(data, place)[0])
        place = _compact_skip(data, place, kind, 0)
    raise InvalidError(f"field {wanted} is missing or null")


def _compact_head(data: bytes, place: int, head: int, last: int) -> tuple[int, int, int]:
    """Returns a field's type, its id and where its value begins."""
    if head >> 4:
        return head & 15, last + (head >> 4), place + 1
    number, place = _varint(data, place + 1)
    return head & 15, _zigzag(number), place


def _compact_skip(data: bytes, place: int, kind: int, depth: int) -> int:
    """Returns where the value at ``place`` ends; a field's bool has no bytes of its own."""
    if depth > _DEPTH_MAX:
        raise InvalidError("value is not Thrift's compact protocol: it is nested too deep")
    if kind in (_C_TRUE, _C_FALSE):
        return place
    if kind in _C_SIZES:
        return _within(data, place + _C_SIZES[kind])
    if kind in (_C_I16, _C_I32, _C_I64):
        return _varint(data, place)[1]
    if kind == _C_BINARY:
        size, place = _varint(data, place)
        return _within(data, place + size)
    if kind == _C_STRUCT:
        while head := data[place]:
            inner, _, place = _compact_head(data, place, head, 0)
            place = _compact_skip(data, place, inner, depth + 1)
        return place + 1
    if kind in (_C_LIST, _C_SET, _C_MAP):
        return _compact_skip_many(data, place, kind, depth)
    raise InvalidError(f"value is not Thrift's compact protocol: it has the type {kind}")


def _compact_skip_many(data: bytes, place: int, kind: int, depth: int) -> int:
    if kind == _C_MAP:
        count, place = _varint(data, place)
        if count == 0:
            return place
        kinds: tuple[int, ...] = (data[place] >> 4, data[place] & 15)
        place += 1
    else:
        kinds, count, place = (data[place] & 15,), data[place] >> 4, place + 1
        if count == 15:
            count, place = _varint(data, place)
    for _ in range(_bounded(data, count)):
        for each in kinds:
            # Inside a list or a map, a bool does have a byte.
            inner = _C_BYTE if each in (_C_TRUE, _C_FALSE) else each
            place = _compact_skip(data, place, inner, depth + 1)
    return place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7
        if shift > 63:
            raise InvalidError("value is not Thrift's compact protocol: a number is too long")


def _zigzag(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


def _unpack(form: Struct, data: bytes, place: int) -> int:
    _within(data, place + form.size)
    return int(form.unpack_from(data, place)[0])


def _bounded(data: bytes, count: int) -> int:
    if not 0 <= count <= len(data):
        raise IndexError(count)
    return count


def _within(data: bytes, end: int) -> int:
    """Returns an end, which must be inside the data."""
    if end > len(data):
        raise IndexError(end)
    return end
