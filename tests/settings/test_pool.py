"""Settings of the pool: what cannot work, or would be open by mistake, is refused by name."""

from __future__ import annotations

import pytest

from kvstore.model.errors import ConfigError
from kvstore.settings import Settings, load_settings

POOL = "pool.url=mooncake://127.0.0.1:50051"


def test_there_is_no_pool_by_default() -> None:
    assert not Settings().pool.on


@pytest.mark.parametrize(
    ("url", "master"),
    [
        ("mooncake://127.0.0.1", "127.0.0.1:50051"),
        ("mooncake://localhost:1234", "localhost:1234"),
        ("mooncake://[::1]:7", "[::1]:7"),
    ],
)
def test_the_master_is_named_by_a_url(url: str, master: str) -> None:
    pool = load_settings(None, [f"pool.url={url}"]).pool
    assert (pool.on, pool.master) == (True, master)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["pool.url=http://127.0.0.1:1"], "write mooncake://HOST:50051"),
        (["pool.url=mooncake://"], "write mooncake://HOST:50051"),
        (["pool.url=mooncake://127.0.0.1:0"], "write mooncake://HOST:50051"),
        (["pool.url=mooncake://127.0.0.1:x"], "write mooncake://HOST:50051"),
        (["pool.url=mooncake://127.0.0.1/path"], "write mooncake://HOST:50051"),
        (["pool.url=mooncake://me@127.0.0.1"], "write mooncake://HOST:50051"),
        (["pool.url=mooncake://a b"], "write mooncake://HOST:50051"),
        (["pool.url=mooncake://10.0.0.1"], "pool.insecure=true"),
        ([POOL, "pool.metadata=ftp://x"], "write P2PHANDSHAKE or http://"),
        ([POOL, "pool.protocol=udp"], "choose one of tcp, rdma"),
        ([POOL, "pool.address=a:b:c"], "no host name or IP address"),
        ([POOL, "pool.device=a b"], "write mlx5_0"),
        ([POOL, "pool.segment=1MiB"], "Mooncake takes no less than 16MiB"),
        ([POOL, "pool.buffer=1MiB"], "pool.buffer=1MiB is not in 4MiB"),
        ([POOL, "tenants.acme.weight=1"], "tenants do not share a pool yet"),
        ([POOL, "security.root_key_file=/key"], "not encrypted yet"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, overrides)
    assert named in str(refused.value)


def test_a_network_of_ones_own_may_be_open_in_words() -> None:
    words = ["pool.url=mooncake://10.0.0.1:50051", "pool.insecure=true"]
    assert load_settings(None, words).pool.insecure
