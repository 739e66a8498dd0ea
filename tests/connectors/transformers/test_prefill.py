"""How fast the model computes prompts, seen without waiting for its device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore_transformers import prefill  # noqa: E402
from kvstore_transformers.prefill import PieceClock  # noqa: E402

CPU = torch.device("cpu")


class Moment:
    """As a CUDA event: the device comes to it later."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.come = False

    def query(self) -> bool:
        return self.come

    def elapsed_time(self, later: Moment) -> float:
        return later.at_ms - self.at_ms


@pytest.fixture
def moments(monkeypatch):
    made: list[Moment] = []

    def now(device: object) -> Moment:
        made.append(Moment(1000.0 * len(made)))
        return made[-1]

    monkeypatch.setattr(prefill, "_now", now)
    return made


def test_it_is_known_when_the_device_has_come_to_the_last_layer(moments):
    clock = PieceClock()
    for layer in range(5):
        clock.note(500, layer, 5, CPU)
        assert clock.s_per_token == 0
    moments[-1].come = True
    assert clock.s_per_token == pytest.approx(1.0 * 5 / 4 / 500)
    clock.note(1, 0, 5, CPU)  # decoding
    assert clock.s_per_token > 0
    clock.note(200, 0, 5, CPU)  # the next piece begins
    assert clock.s_per_token == 0


def test_time_spent_waiting_for_a_restore_is_not_taken_for_computing(moments):
    for waited, known in ((0.05, True), (0.5, False)):
        clock = PieceClock()
        clock.note_wait(9.0)  # before the first layer
        clock.note(500, 0, 3, CPU)
        clock.note_wait(waited)
        clock.note(500, 2, 3, CPU)
        moments[-1].come = True
        assert bool(clock.s_per_token) == known


def test_the_host_is_timed_by_its_own_clock():
    clock = PieceClock()
    clock.note(500, 0, 2, CPU)
    clock.note(500, 1, 2, CPU)
    assert 0 < clock.s_per_token < 1


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_events():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device, clock = torch.device("cuda"), PieceClock()
    clock.note(1000, 0, 2, device)
    torch.cuda._sleep(20_000_000)
    clock.note(1000, 1, 2, device)
    torch.cuda.synchronize()
    assert 1e-3 < 1000 * clock.s_per_token < 1
