"""Addresses, secrets, and life without the library."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.settings import ObjectSettings, load_settings
from kvstore.testing.seaweed import ACCESS_KEY, Seaweed
from kvstore.tier.object import ObjectFailed
from tests.tier.object.opened import opened, run

SECRET = "s3cr3t-t0k3n"


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["object.url=ftp://bucket"], "s3://"),
        (["object.url=bucket"], "s3://"),
        ([f"object.url=s3://key:{SECRET}@bucket"], "credentials"),
        ([f"object.url=az://box?sig={SECRET}"], "parameters"),
        (["object.url=s3://b", "object.endpoint=http://127.0.0.1:1"], "allow_http"),
        (["object.url=s3://b", f"object.endpoint=https://u:{SECRET}@h"], "credentials"),
        (["object.url=file:///b", "object.endpoint=https://h"], "az://"),
        (["object.requests_max=0"], "1..1024"),
        (["object.url=s3://b", "file.path="], "set file.path"),
    ],
)
def test_an_impossible_address_is_refused_and_not_quoted(overrides: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        load_settings(None, overrides)
    assert SECRET not in str(caught.value)


def test_http_has_to_be_allowed() -> None:
    settings = load_settings(
        None,
        ["object.url=s3://b/p", "object.endpoint=http://127.0.0.1:1", "object.allow_http=true"],
    )
    assert settings.object.allow_http


@pytest.mark.parametrize(
    "url", ["s3://bucket/prefix", "gs://bucket/prefix", "az://box/prefix", "file://{}/new/folder"]
)
def test_every_kind_of_address_is_opened_without_asking_anybody(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.tier.object.connect import connect

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    connect(ObjectSettings(url=url.format(tmp_path), region="eu-1"))  # which only s3:// has


def test_no_secret_is_in_an_error_or_a_log_line(
    seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    caplog.set_level(logging.DEBUG)

    async def test() -> None:
        async with opened(dict(seaweed.settings()), ready=False) as side:
            with pytest.raises(KVStoreError) as caught:
                await side.tier.collect()
            shown = f"{caught.getrepr(style='long', chain=True)} {side.tier.stats()}"
            for text in (shown, caplog.text, str(side.metrics.totals())):
                assert SECRET not in text
                assert ACCESS_KEY not in text

    run(test)


def test_what_the_library_says_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    nobody = {"url": "s3://bucket", "endpoint": "http://127.0.0.1:9", "allow_http": True}

    async def test() -> None:
        async with opened(nobody, ready=False) as side:
            with pytest.raises(ObjectFailed, match="connection") as caught:
                await side.tier.collect()
            assert caught.value.__suppress_context__
            assert caught.value.__cause__ is None

    run(test)


def test_without_the_library_everything_else_works() -> None:
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "import kvstore.daemon\n"
        "from kvstore.settings import ObjectSettings\n"
        "from kvstore.tier.object.connect import connect\n"
        "from kvstore.model.errors import ConfigError\n"
        "try: connect(ObjectSettings(url='s3://bucket'))\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "kvstore-tiers[object]" in done.stdout
