"""Versions of engines: which are taken, which are refused, and how another one may try."""

from __future__ import annotations

import logging

import pytest

from kvstore import Incompatible
from kvstore.system.engine_versions import ALLOW, check_tested, release_of


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW, raising=False)


def check(found: str, *tested: str, between: bool = False, allow_untested: bool = False) -> None:
    check_tested(
        "Engine",
        found,
        tested,
        allow_untested=allow_untested,
        allow='add "allow_untested": true',
        between=between,
    )


@pytest.mark.parametrize("found", ["0.28.0", "0.32.1", "0.32.0+cpu", "0.32.1rc2.dev3+g1", "0.32"])
def test_every_patch_of_a_tested_version_is_taken(found: str) -> None:
    check(found, "0.28", "0.32")


@pytest.mark.parametrize("found", ["0.30.0", "0.31.2"])
def test_what_lies_between_is_taken_only_if_that_is_said(found: str) -> None:
    check(found, "0.28", "0.32", between=True)
    with pytest.raises(Incompatible):
        check(found, "0.28", "0.32")


@pytest.mark.parametrize(
    "found", ["0.33.0", "1.0", "0.27.9", "0.3.2", "0.320.0", "dev", "", "unknown"]
)
def test_others_are_refused_with_the_list_and_with_what_lets_them_try(found: str) -> None:
    with pytest.raises(Incompatible) as refused:
        check(found, "0.28", "0.30", "0.32", between=True)
    assert str(refused.value) == (
        f"Engine {found} is not tested with kvstore, only 0.28, 0.30, 0.32; install one of these, "
        'or add "allow_untested": true to try it'
    )


def test_an_exact_version_is_that_one_alone() -> None:
    check("0.5.6", "0.5.6")
    for other in ("0.5.7", "0.5.60", "0.5"):
        with pytest.raises(Incompatible):
            check(other, "0.5.6")


def test_what_may_try_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        check("9.9", "0.28", allow_untested=True)
        monkeypatch.setenv(ALLOW, "1")
        check("9.9", "0.28")
        monkeypatch.setenv(ALLOW, "0")
        with pytest.raises(Incompatible):
            check("9.9", "0.28")
    assert [record.getMessage() for record in caplog.records] == [
        "engine=untested name='Engine' version=9.9 tested='0.28'"
    ] * 2


def test_numbers_of_versions() -> None:
    assert release_of("v1.2.3rc4") == (1, 2, 3)
    assert release_of("0.33.0+cu130") == (0, 33, 0)
    assert release_of("0.33.") == (0, 33)
    assert release_of("main") == ()
