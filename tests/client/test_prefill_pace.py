"""What an engine's own speed is taken to be."""

from __future__ import annotations

import random

from kvstore.client.prefill_pace import PrefillPace

STEP = 2048


def step_s(begin: int, tokens: int = STEP) -> float:
    """Seconds of a step whose first token has so many before it: 2 s for 8k tokens, 140 s for
    128k."""
    return tokens * (200e-6 + 7e-9 * (begin + tokens / 2))


def prompt_s(tokens: int) -> float:
    return sum(step_s(begin) for begin in range(0, tokens, STEP))


def compute(pace: PrefillPace, tokens: int, noise: float = 0.0) -> None:
    rng = random.Random(tokens)
    for begin in range(0, tokens, STEP):
        seconds = step_s(begin) * (1 + noise * rng.random())
        pace.note(STEP, seconds, begin + STEP / 2)


def expected_s(pace: PrefillPace, tokens: int) -> float:
    return tokens * pace.s_per_token(tokens / 2)


def test_a_step_that_warms_up_or_is_disturbed_does_not_make_the_engine_look_slow() -> None:
    pace = PrefillPace()
    assert pace.s_per_token() == 0
    pace.note(0, 1.0)
    pace.note(512, 4.0)
    assert pace.s_per_token() == 4.0 / 512  # better than nothing
    pace.note(512, 0.5)
    assert pace.s_per_token() == 0.5 / 512
    for number in range(14):
        pace.note(1000, 1.0 if number % 2 else 1.1)
    assert pace.s_per_token() in (0.001, 0.5 / 512)


def test_a_machine_that_got_slower_is_noticed() -> None:
    pace = PrefillPace()
    for seconds in (*[1.0] * 32, *[2.0] * 32):
        pace.note(1000, seconds)
    assert pace.s_per_token() == 0.002


def test_a_short_prompt_after_a_long_one_is_not_waited_for_longer_than_it_takes() -> None:
    """The last steps of 128k tokens take 5 times as long as those of a prompt of 8k."""
    pace = PrefillPace()
    compute(pace, 131_072)
    assert 0.9 < expected_s(pace, 8192) / prompt_s(8192) < 1.1
    assert 0.9 < expected_s(pace, 131_072) / prompt_s(131_072) < 1.1


def test_a_long_prompt_after_short_ones_is_not_given_up_before_it_pays() -> None:
    pace = PrefillPace()
    for _ in range(8):
        compute(pace, 16_384)
    assert 0.7 < expected_s(pace, 131_072) / prompt_s(131_072) < 1.1


def test_noise_does_not_turn_the_line_around() -> None:
    pace = PrefillPace()
    for tokens in (8192, 32_768, 8192, 131_072):
        compute(pace, tokens, noise=0.5)
    for tokens in (2048, 8192, 32_768, 131_072):
        assert 0.0 < expected_s(pace, tokens) < 1.6 * prompt_s(tokens)


def test_depths_that_are_alike_tell_no_slope() -> None:
    pace = PrefillPace()
    pace.note(1000, 1.0, 500)
    pace.note(1000, 2.0, 700)
    assert pace.s_per_token(100) == pace.s_per_token(100_000) == 0.001


def test_deep_steps_that_are_disturbed_less_make_no_negative_pace() -> None:
    pace = PrefillPace()
    pace.note(1000, 5.0, 1000)
    pace.note(1000, 1.0, 100_000)
    for depth in (0, 500, 1000, 100_000, 1_000_000):
        assert pace.s_per_token(depth) > 0
