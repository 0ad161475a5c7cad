"""Reads journals by their URLs, without Tidelog and without credentials; needs pyarrow alone.

    tidelog journals orders --presign 1h --json | python read_journals.py

Prints a JSON line for each event. Deleted and trimmed events are left out, and updated ones have
their new value. With Tidelog installed, ``tidelog.read_journal(entry)`` does the same, and checks
checksums too.
"""

import base64
import json
import sys
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq


def fetch(url, start=None, end=None):
    """Returns the bytes of a URL, or a range of them."""
    headers = {} if end is None else {"Range": f"bytes={start}-{end - 1}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:  # noqa: S310
        data = answer.read()
        return data if getattr(answer, "status", None) == 206 else data[start:end]


def new_value(found):
    """Returns the value of an update, which is in the entry or in its own object."""
    if found["url"] is not None:
        return fetch(found["url"])
    return None if found["value"] is None else base64.b64decode(found["value"])


def read(entry):
    """Yields offset and fields of each event of an entry."""
    data = fetch(entry["url"], entry["byte_start"], entry["byte_end"])
    if entry["format"] == "parquet":
        rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    else:
        front = fetch(entry["url"], *entry["schema"])
        rows = pa.ipc.open_stream(pa.BufferReader(front + data)).read_all().to_pylist()
    values = {each["offset"]: each for each in entry["values"]}
    for number, row in enumerate(rows):
        offset = row.pop("offset", entry["base"] + number)
        if offset < entry["start"] or offset in entry["deleted"]:
            continue
        if offset in values:
            row["value"] = new_value(values[offset])
        yield offset, row


for line in sys.stdin:
    entry = json.loads(line)
    for offset, row in read(entry):
        place = {"partition": entry["partition"], "offset": offset}
        fields = {name: row[name] for name in ("id", "key", "timestamp", "type", "value")}
        shown = {
            name: value.decode(errors="replace") if isinstance(value, bytes) else value
            for name, value in fields.items()
        }
        print(json.dumps({**place, **shown}, default=str))
