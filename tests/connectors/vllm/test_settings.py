"""Settings are checked before the engine starts."""

from __future__ import annotations

import pytest

from kvstore.model.errors import ConfigError
from kvstore_vllm.settings import Settings, parse_settings


def test_defaults_need_only_a_target():
    settings = parse_settings({"target": "unix:/run/kvstore/kvstore.sock"})
    assert settings == Settings("unix:/run/kvstore/kvstore.sock")
    assert settings.load_deadline_s == 5.0


def test_the_daemon_s_user_is_a_number():
    assert parse_settings({"target": "unix:/k", "daemon_uid": 970}).daemon_uid == 970
    assert parse_settings({"target": "unix:/k"}).daemon_uid is None


def test_integers_are_seconds_too():
    assert parse_settings({"target": "unix:/k", "load_deadline_s": 2}).load_deadline_s == 2.0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "target"),
        ({"target": ""}, "target"),
        ({"target": "127.0.0.1:7700"}, "target"),
        ({"target": "unix:/k", "load_deadline": 1}, "load_deadline"),
        ({"target": "unix:/k", "load_deadline_s": "1"}, "load_deadline_s"),
        ({"target": "unix:/k", "load_deadline_s": -1}, "load_deadline_s"),
        ({"target": "unix:/k", "save_queue_jobs": 0}, "save_queue_jobs"),
        ({"target": "unix:/k", "fidelity": "fine"}, "fidelity"),
        ({"target": "unix:/k", "fidelity": "ep", "record": "raw"}, "leave one of them out"),
        ({"target": "unix:/k", "daemon_uid": -1}, "daemon_uid"),
        ({"target": "unix:/k", "daemon_uid": "kvstore"}, "daemon_uid"),
    ],
)
def test_what_is_missing_unknown_or_malformed_is_named(extra, named):
    with pytest.raises(ConfigError, match=named):
        parse_settings(extra)
