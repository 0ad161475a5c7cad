"""An S3 server over a local folder (versitygw), exact on `If-None-Match` and `If-Match`."""

import functools
import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.servers import probe
from tests.servers.base import HOST, environment, free_port, workspace
from tests.servers.fetch import Package, ensure, go_fill
from tests.servers.process import Launch, Process, started
from tests.servers.tools import GO

NAME = "s3"
VERSION = "1.8.0"
TARGET = f"github.com/versity/versitygw/cmd/versitygw@v{VERSION}"
TOOLS = (GO,)
PACKAGE = Package(
    server=NAME,
    version=VERSION,
    recipe=TARGET,
    tools=TOOLS,
    fill=functools.partial(go_fill, NAME, TARGET),
)

REGION = "us-east-1"
ACCESS_KEY = "tidelogtest"  # letters and digits alone, as DynamoDB Local wants its keys
SECRET_KEY = "tidelog-test-secret"


@dataclass(frozen=True)
class S3:
    """A running server and the keys of its owner."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str
    process: Process

    @property
    def address(self) -> str:
        return self.endpoint

    def fresh_bucket(self, prefix: str = "test") -> str:
        """Create an empty bucket that no other test uses, and return its name."""
        bucket = f"{prefix}-{uuid.uuid4().hex[:16]}"
        self._client().create_bucket(Bucket=bucket)
        return bucket

    def reader(self, bucket: str) -> tuple[str, str]:
        """The keys of a new user who may list and read a bucket, and change nothing."""
        access, secret = f"reader{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        subprocess.run(
            [
                *(str(ensure(PACKAGE) / "versitygw"), "admin", "--endpoint-url", self.endpoint),
                *("--access", self.access_key, "--secret", self.secret_key),
                *("create-user", "--access", access, "--secret", secret, "--role", "user"),
            ],
            check=True,
            capture_output=True,
        )
        allowed = {
            "Effect": "Allow",
            "Principal": {"AWS": [access]},
            "Action": ["s3:ListBucket", "s3:GetObject"],
            "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
        }
        policy = {"Version": "2012-10-17", "Statement": [allowed]}
        self._client().put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        return access, secret

    def _client(self) -> Any:
        # Every test run loads this module, and boto3 takes half a second to load.
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
        )


@contextmanager
def running() -> Iterator[S3]:
    """A server of one's own; it keeps its objects over `process.restart()`."""
    program = ensure(PACKAGE) / "versitygw"
    port = free_port()
    with workspace(NAME) as folder:
        data, sidecar, users = folder / "data", folder / "sidecar", folder / "users"
        for each in (data, sidecar, users):
            each.mkdir()
        launch = Launch(
            name=NAME,
            # Connections stay open between requests, as those of S3 do. The sidecar holds object
            # attributes, for which not every temporary folder has room.
            command=[
                *(str(program), "--port", f"{HOST}:{port}", "--region", REGION),
                *("--quiet", "--keep-alive", "--iam-dir", str(users)),
                *("posix", "--sidecar", str(sidecar), str(data)),
            ],
            environment=environment(
                {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
                without=("ROOT_", "VGW_", "LOGFILE", "WEBHOOK"),
            ),
            folder=folder,
            answers=lambda: _refuses_a_stranger(port),
        )
        with started(launch) as process:
            yield S3(f"http://{HOST}:{port}", ACCESS_KEY, SECRET_KEY, REGION, process)


def _refuses_a_stranger(port: int) -> bool:
    """Whether it answers an unsigned request with S3's own error, in XML."""
    status, body = probe.http(port)
    return status == 403 and b"<Error>" in body
