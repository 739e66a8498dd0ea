"""Numbers are said to people without exponents, whatever their size."""

import pytest

from kvstore.model.outcome import Reason
from kvstore.model.words import advice_text, duration, rounded, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.14159, "3.14"),
        (99.99, "100"),
        (999.6, "1000"),
        (2000.4, "2,000"),
        (1_234_567, "1,234,567"),
        (0.00000321, "0.00000321"),
    ],
)
def test_a_number_has_no_exponent(value: float, text: str) -> None:
    assert rounded(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0125, "12.5 ms"),
        (0.9996, "1 s"),
        (59.99, "1 min"),
        (3599.9, "1 h"),
        (5400, "1.5 h"),
        (2000 * 86400, "2,000 days"),
    ],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_size_beyond_all_units_has_no_exponent() -> None:
    assert size(3.5 * (1 << 30)) == "3.5 GiB"
    assert size(20_000 << 40) == "20,000 TiB"


def test_no_limit_is_told_to_be_raised_that_is_none() -> None:
    assert "cluster.serve_reads there" in advice_text(Reason.PEER_BUSY)
    assert "cluster.serve_bytes_per_s, if it is not 0" in advice_text(Reason.PEER_BUSY)
