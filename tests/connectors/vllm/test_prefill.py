"""What the engine's own speed is taken to be."""

from __future__ import annotations

from kvstore_vllm.prefill import PrefillPace


def test_a_step_that_warms_up_or_is_disturbed_does_not_make_the_engine_look_slow() -> None:
    pace = PrefillPace()
    assert pace.s_per_token == 0
    pace.note(0, 1.0)
    pace.note(512, 4.0)
    assert pace.s_per_token == 4.0 / 512  # better than nothing
    pace.note(512, 0.5)
    assert pace.s_per_token == 0.5 / 512
    for number in range(14):
        pace.note(1000, 1.0 if number % 2 else 1.1)
    assert pace.s_per_token in (0.001, 0.5 / 512)


def test_a_machine_that_got_slower_is_noticed() -> None:
    pace = PrefillPace()
    for seconds in (*[1.0] * 16, *[2.0] * 16):
        pace.note(1000, seconds)
    assert pace.s_per_token == 0.002
