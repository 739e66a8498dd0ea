"""What to do about a store that refuses or fails: for logs, `kvstore status` and `doctor`."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvstore.model.errors import KVStoreError
from kvstore.settings import ObjectSettings
from kvstore.tier.object.failure import Cause, ObjectFailed, ObjectRefused

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT, the path of a key file",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "the owner and mode of the folder",
}
_ADVICE = {
    Cause.CREDENTIALS: "set {credentials} in the daemon's environment, or give this machine a role",
    Cause.FORBIDDEN: "check the credentials ({credentials}), and that they may list, read, write "
    "and delete in {bucket}; then object.region and object.endpoint",
    Cause.BUCKET: "make the bucket {bucket}, or correct object.url and object.endpoint",
    Cause.REGION: "set object.region to the region of {bucket}, and check object.endpoint",
    Cause.NAME: "check object.endpoint ({store}) and this machine's DNS",
    Cause.CONNECTION: "check that {store} is up and can be reached: object.endpoint, firewall, "
    "proxy",
    Cause.TLS: "check the certificate of {store}; a store without TLS is http://, and needs "
    "object.allow_http=true",
}


def advice(error: KVStoreError, settings: ObjectSettings) -> str:
    """Return what the operator should check, "" if only waiting helps. Quotes no secret."""
    if not isinstance(error, ObjectRefused | ObjectFailed) or error.cause not in _ADVICE:
        return ""
    parts = urlsplit(settings.url)
    return _ADVICE[error.cause].format(
        credentials=_CREDENTIALS[parts.scheme],
        bucket=parts.netloc or parts.path,
        store=settings.endpoint or f"the provider of {parts.scheme}://",
    )
