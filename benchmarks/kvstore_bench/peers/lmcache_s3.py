"""LMCache over a bucket, by its own S3 client, on a SeaweedFS of loopback.

That client puts the bucket into the host's name alone, and no name of a bucket leads to loopback
here. So the model's name begins with the bucket, as the server reads it in the path.
"""

from __future__ import annotations

from kvstore.testing.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, Seaweed
from kvstore_bench.peers.lmcache import MODEL, Manager
from kvstore_bench.peers.system import Place, System


def open_system(place: Place) -> System:
    return OverS3(place)


class OverS3(Manager):
    """The server keeps its files where the others do, and is killed and started with LMCache."""

    def __init__(self, place: Place) -> None:
        self._server = Seaweed(directory=place.directory).start()
        super().__init__(
            place,
            {
                "type": "s3",
                "s3_endpoint": f"127.0.0.1:{self._server.port}",
                "s3_region": "us-east-1",
                "s3_num_io_threads": place.threads,
                "s3_prefer_http2": False,
                "disable_tls": True,
                "aws_access_key_id": ACCESS_KEY,
                "aws_secret_access_key": SECRET_KEY,
            },
            model=f"{BUCKET}/{MODEL}",
        )

    def close(self) -> None:
        super().close()
        self._server.stop()
