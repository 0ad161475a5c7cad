"""Sessions of the AWS SDK that share what its files say of services.

Each session has credentials and a region of its own. The descriptions of services are the same for
all, and take most of the time in which a client is made: they are read once in a process.
"""

from __future__ import annotations

from typing import Any

import boto3
import botocore.session
from botocore import exceptions as sdk

__all__ = ["NO_CREDENTIALS", "aws_session"]

NO_CREDENTIALS = (  # errors of the SDK that mean that it has no usable ones
    sdk.CredentialRetrievalError,
    sdk.LoginError,
    sdk.NoAuthTokenError,
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.ProfileNotFound,
    sdk.SSOError,
    sdk.TokenRetrievalError,
)

_loaders: dict[tuple[str, ...], Any] = {}  # by the folders that they read: AWS_DATA_PATH adds some


def aws_session(**given: Any) -> boto3.session.Session:
    """Returns a session of its own: ``given`` is what ``boto3.session.Session`` takes."""
    core = botocore.session.get_session()
    session = boto3.session.Session(botocore_session=core, **given)
    own = core.get_component("data_loader")
    core.register_component("data_loader", _loaders.setdefault(tuple(own.search_paths), own))
    return session
