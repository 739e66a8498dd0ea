"""Uses are counted where they end, and are not lost when what they ended at is forgotten."""

from kvstore.decide.uses import NAME_NBYTES, Use, Uses
from kvstore.model.block import BlockKey
from kvstore.testing.samples import sample_keys


def name(key: BlockKey) -> bytes:
    return key[:NAME_NBYTES]


def counted(uses: Uses) -> dict[bytes, Use]:
    return dict(uses.all())


def test_a_use_is_of_the_last_block_and_knows_some_before() -> None:
    keys, times = sample_keys("a", 12), iter(range(9))
    uses = Uses(lambda: next(times))
    uses.served(keys)
    uses.served(keys)
    uses.served([])
    before = tuple(name(keys[at]) for at in (10, 9, 7, 3, 0))
    assert counted(uses) == {name(keys[11]): Use(2, 1, before)}


def test_what_is_put_is_used_without_being_a_hit() -> None:
    keys = sample_keys("a", 4)
    uses = Uses(lambda: 5.0)
    uses.stored(keys[1:], keys[0])
    (use,) = counted(uses).values()
    assert use == Use(0, 5.0, (name(keys[2]), name(keys[1]), name(keys[0])))


def test_old_places_are_folded_into_the_start_of_their_prefix() -> None:
    uses = Uses(lambda: 1.0, ends_max=10, starts_max=3)
    start = sample_keys("system", 1)
    for number in range(30):
        uses.served([*start, *sample_keys(f"chat {number}", 3)])
    found = counted(uses)
    assert len(found) == 11
    assert found[name(start[0])].hits == 20
    assert sum(use.hits for use in found.values()) == 30
    for number in range(30):
        uses.served(sample_keys(f"other {number}", 2))
    assert len(counted(uses)) == 13
