"""What is told without SGLang: settings, versions, and how long a prefix may be."""

from __future__ import annotations

import pytest

from kvstore import ConfigError, Incompatible
from kvstore.client.lookup_lease import leading
from kvstore.system import engine_versions
from kvstore_sglang.compat import check_version
from kvstore_sglang.hits import Needs, lengths
from kvstore_sglang.settings import SGLANGS_OWN, parse_settings


def test_sglangs_own_keys_are_left_to_it() -> None:
    settings = parse_settings(
        {**dict.fromkeys(SGLANGS_OWN, 1), "target": "unix:/x", "weights": "w"}
    )
    assert (settings.target, settings.weights) == ("unix:/x", "w")
    assert parse_settings(None) == parse_settings({})
    assert not settings.limits.from_files  # nothing holds SGLang's pages after a deadline


@pytest.mark.parametrize(
    "given", [{"sockte": "unix:/x"}, {"target": "/x"}, {"save_deadline_s": -1}, {"weights": 7}]
)
def test_unknown_and_malformed_keys_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"extra-config: .*known keys: target, "):
        parse_settings(given)


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise engine_versions.PackageNotFoundError(name)

    monkeypatch.delenv(engine_versions.ALLOW, raising=False)
    monkeypatch.setattr(engine_versions, "version", missing)
    with pytest.raises(Incompatible, match="pip install sglang"):
        check_version(allow_untested=True)
    monkeypatch.setattr(engine_versions, "version", lambda _: "0.4.1")
    with pytest.raises(Incompatible, match=r"SGLang 0\.4\.1 is not tested .*, only 0\.5\.23"):
        check_version(allow_untested=False)
    assert check_version(allow_untested=True) == "0.4.1"


def test_how_long_a_prefix_may_be() -> None:
    there = [True, True, False, True, True, True]
    assert leading(there) == 2
    assert leading([]) == 0
    assert lengths(Needs(0, there), 6) == [1, 2]
    assert lengths(Needs(0, there), 1) == [1]
    assert lengths(Needs(1, there), 6) == [1, 2, 4, 5, 6]
    assert lengths(Needs(2, there), 6) == [1, 2, 5, 6]
    assert lengths(Needs(3, there), 5) == [1, 2]
    assert lengths(Needs(9, [True] * 4), 4) == [1, 2, 3, 4]
    assert lengths(Needs(1, []), 0) == []
