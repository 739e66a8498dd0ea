"""Samples are few, add up over steps, and outlive the process that took them."""

import random
import sys
import zlib
from array import array

import msgspec
import pytest

from kvstore.store import samples
from kvstore.store.samples import COLUMNS, COUNTED, HELD, MOST, STEPS_S, Samples, packed, unpacked

BEGIN = 1_700_000_000.0  # on no whole step


def row(**columns: float) -> list[float]:
    """Return the values of a sample; "." is written "__"."""
    return [columns.get(name.replace(".", "__"), 0.0) for name in COLUMNS]


def fill(kept: Samples, count: int, begin: float = BEGIN, seconds: float = 1.0) -> None:
    draw = random.Random(3)
    rows = [[draw.random() for _ in COLUMNS] for _ in range(50)]
    for number in range(count):
        kept.add(begin + seconds * number, seconds, rows[number % 50])


def test_a_day_of_samples_is_bounded() -> None:
    kept = Samples()
    fill(kept, 20_000, seconds=5.0)
    assert [len(kept.since(step)) for step in STEPS_S] == [300, 361, 289]  # one is not over
    nbytes = sum(sys.getsizeof(s.values) for step in STEPS_S for s in kept.since(step))
    assert nbytes < 1 << 20


def test_coarse_samples_add_up_what_the_fine_ones_counted() -> None:
    kept, last = Samples(), 0.0
    for second in range(25):
        last = BEGIN + second
        kept.add(last, 1.0, row(requests=2.0, dram__used_bytes=second, queue__room=second % 7))
    for step in STEPS_S:
        found = kept.since(step)
        requests = [s.values[COLUMNS.index("requests")] for s in found]
        assert sum(requests) == 50
        assert sum(s.seconds for s in found) == 25
        assert found[-1].values[COLUMNS.index("dram.used_bytes")] == 24  # the last of it
        assert max(s.values[COLUMNS.index("queue.room")] for s in found) == 6  # the most in it
    assert len(kept.since(10)) == 4  # the first and the last are not whole
    assert kept.since(1, last - 2) == kept.since(1)[-2:]


def test_what_does_not_change_takes_no_memory() -> None:
    kept = Samples()
    for second in range(300):
        kept.add(BEGIN + second, 1.0, row(dram__capacity_bytes=9.0))
    assert len({id(sample.values) for sample in kept.since(1)}) == 1


def test_a_clock_that_is_set_back_costs_what_was_dated_later() -> None:
    kept = Samples()
    fill(kept, 100)
    kept.add(BEGIN + 50, 1.0, row())
    for step in STEPS_S:
        times = [sample.at for sample in kept.since(step)]
        assert times == sorted(times)
        assert times[-1] == BEGIN + 50


def test_another_life_goes_on_where_one_was() -> None:
    kept, again = Samples(), Samples()
    fill(kept, 1000)
    everything = packed(kept.rows())
    last = kept.since(1)[-1].at
    fill(kept, 200, BEGIN + 1000)
    again.load(everything, packed({1: kept.since(1, last)}), BEGIN + 1200)
    for step in STEPS_S:
        mine, theirs = kept.since(step), again.since(step)
        assert [s.at for s in mine] == [s.at for s in theirs]
        assert [list(s.values) for s in mine] == [pytest.approx(list(s.values)) for s in theirs]
    assert len(everything) < 1 << 20


def test_samples_from_the_future_are_not_taken() -> None:
    kept, again = Samples(), Samples()
    fill(kept, 100)
    again.load(packed(kept.rows()), b"", BEGIN + 49)
    assert again.since(1)[-1].at == BEGIN + 49


def test_columns_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Samples()
    kept.add(BEGIN, 1.0, row(requests=7.0, blocks=3.0))
    other = ("invented", *reversed([name for name in COLUMNS if name != "blocks"]))
    values = array("d", [5.0, *reversed(row(requests=7.0)[: COLUMNS.index("blocks")])])
    values.extend([0.0] * (len(other) - len(values)))
    values[other.index("requests")] = 7.0
    monkeypatch.setattr(samples, "COLUMNS", other)
    theirs = packed({1: [samples.Sample(BEGIN, 1.0, values)]})
    monkeypatch.undo()
    (found,) = unpacked(theirs)[1]
    assert found.values[COLUMNS.index("requests")] == 7.0
    assert found.values[COLUMNS.index("blocks")] == 0.0


def test_bytes_of_anybody_are_no_samples() -> None:
    kept = Samples()
    fill(kept, 5)
    good, draw = packed(kept.rows()), random.Random(5)
    for _ in range(300):
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        unpacked(bytes(bad[: draw.randrange(len(bad) + 1)]))
    nan = array("d", [float("nan")] * len(COLUMNS))
    wrong = [
        [[7, [1.0], [1.0], bytes(8 * len(COLUMNS))]],  # no such step
        [[1, [1.0, 2.0], [1.0], bytes(8 * len(COLUMNS))]],
        [[1, [2.0], [1.0], nan.tobytes()]],
        [[1, [float("inf")], [1.0], bytes(8 * len(COLUMNS))]],
        [[1, [2.0], [-1.0], bytes(8 * len(COLUMNS))]],
    ]
    for levels in wrong:
        data = zlib.compress(msgspec.msgpack.encode([list(COLUMNS), levels]))
        assert not any(unpacked(data).values())
    bomb = zlib.compress(bytes(64 << 20))
    assert unpacked(bomb) == {}
    assert unpacked(b"") == {}


def test_every_column_has_one_kind() -> None:
    assert sorted(COLUMNS) == sorted({*HELD, *MOST, *COUNTED})
