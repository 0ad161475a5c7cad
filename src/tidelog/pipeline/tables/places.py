"""Where a table's library finds an archive's files: our store's URL in the words that it knows.

Credentials are those of the environment, as they are for our own stores; where there are none, the
libraries look for profiles and roles by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.errors import InvalidError
from tidelog.model.address import Address, parse_address

__all__ = ["delta_options", "iceberg_properties", "object_url"]

_KEYS = {
    "AWS_ACCESS_KEY_ID": "s3.access-key-id",
    "AWS_SECRET_ACCESS_KEY": "s3.secret-access-key",
    "AWS_SESSION_TOKEN": "s3.session-token",
}
_FILE_IO = "tidelog.pipeline.tables.iceberg_io.SmallFileIO"


def object_url(store: str, key: str) -> str:
    """The address by which anybody reads an object; a plain path where the store is a folder."""
    address = _address(store)
    if address.scheme == "file":
        return f"{address.path.rstrip('/')}/{key}"
    parts = [address.host, *(part for part in address.path.split("/") if part), key]
    return f"{address.scheme}://{'/'.join(parts)}"


def delta_options(store: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Storage options of deltalake."""
    address = _address(store)
    if address.scheme == "az" and "account" in address.options:
        return {"azure_storage_account_name": address.options["account"]}
    if address.scheme != "s3":
        return {}
    endpoint, region, path_style = _s3(address, environ)
    options = {name: environ[name] for name in _KEYS if name in environ}
    options |= {"AWS_REGION": region, "conditional_put": "etag"}
    options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = "false" if path_style else "true"
    if endpoint:
        options["AWS_ENDPOINT_URL"] = endpoint
        options["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
    return options


def iceberg_properties(store: str, environ: Mapping[str, str]) -> dict[str, str]:
    """FileIO properties of pyiceberg."""
    address = _address(store)
    if address.scheme == "az" and "account" in address.options:
        return {"adls.account-name": address.options["account"]}
    if address.scheme != "s3":
        return {}
    endpoint, region, path_style = _s3(address, environ)
    found = {theirs: environ[name] for name, theirs in _KEYS.items() if name in environ}
    found |= {"s3.region": region, "s3.force-virtual-addressing": str(not path_style).lower()}
    found["py-io-impl"] = _FILE_IO
    if endpoint:
        found["s3.endpoint"] = endpoint
    return found


def _address(store: str) -> Address:
    address = parse_address(store, plain_scheme="file")
    if address.scheme not in ("file", "s3", "gs", "az"):
        raise InvalidError(
            f"store `{store}`: no table can be made of what is there: "
            "use an archive in a folder, S3, Google Cloud Storage or Azure"
        )
    return address


def _s3(address: Address, environ: Mapping[str, str]) -> tuple[str, str, bool]:
    """Endpoint, region and whether buckets stand in the path; as ``store.remote`` decides it."""
    endpoint = address.options.get("endpoint") or environ.get("AWS_ENDPOINT_URL_S3")
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL") or ""
    region = address.options.get("region") or environ.get("AWS_REGION")
    region = region or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    path_style = address.options.get("path_style", "true" if endpoint else "false") == "true"
    return endpoint, region, path_style
