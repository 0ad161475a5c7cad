"""Puts records together as the Kinesis producer library does, by the protobuf library itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MAGIC = b"\xf3\x89\x9a\xc2"
_FIELD = descriptor_pb2.FieldDescriptorProto
_MESSAGES = {
    "Tag": [("key", 1, _FIELD.TYPE_STRING, "required"), ("value", 2, _FIELD.TYPE_STRING, "")],
    "Record": [
        ("partition_key_index", 1, _FIELD.TYPE_UINT64, "required"),
        ("explicit_hash_key_index", 2, _FIELD.TYPE_UINT64, ""),
        ("data", 3, _FIELD.TYPE_BYTES, "required"),
        ("tags", 4, "Tag", "repeated"),
    ],
    "AggregatedRecord": [
        ("partition_key_table", 1, _FIELD.TYPE_STRING, "repeated"),
        ("explicit_hash_key_table", 2, _FIELD.TYPE_STRING, "repeated"),
        ("records", 3, "Record", "repeated"),
    ],
}
_LABELS = {
    "required": _FIELD.LABEL_REQUIRED,
    "repeated": _FIELD.LABEL_REPEATED,
    "": _FIELD.LABEL_OPTIONAL,
}


def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="kpl_test.proto", package="kpl_test")
    file.syntax = "proto2"
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, label in fields:
            field = message.field.add(name=field_name, number=number, label=_LABELS[label])
            if isinstance(kind, str):
                field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".kpl_test.{kind}"
            else:
                field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("kpl_test.AggregatedRecord"))


Message = _message_class()


def aggregated(records: Sequence[tuple[str, bytes] | tuple[str, bytes, str]]) -> bytes:
    """One record of many: partition key, data and perhaps explicit hash key of each."""
    message = Message()
    keys: list[str] = []
    hash_keys: list[str] = []
    for key, data, *rest in records:
        if key not in keys:
            keys.append(key)
        added = message.records.add(partition_key_index=keys.index(key), data=data)
        for hash_key in rest:
            if hash_key not in hash_keys:
                hash_keys.append(hash_key)
            added.explicit_hash_key_index = hash_keys.index(hash_key)
    message.partition_key_table.extend(keys)
    message.explicit_hash_key_table.extend(hash_keys)
    return sealed(message.SerializeToString())


def sealed(message: bytes) -> bytes:
    """The bytes of a message as a record that looks whole."""
    return MAGIC + message + hashlib.md5(message).digest()
