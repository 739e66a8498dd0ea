"""The Grafana dashboard shows what is exported, and only that."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvstore.metrics import Metrics
from kvstore_vllm.counters import COUNTERS, GAUGES

SCRIPT = Path(__file__).parents[2] / "dashboards/generate.py"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def daemon_metrics() -> Iterator[tuple[str, set[str]]]:
    """Yield each metric's family and the names it has in queries."""
    for family in Metrics(version="1").registry.collect():
        if not family.name.startswith("python_"):
            yield family.name, {family.name + suffix for suffix in SUFFIXES[family.type]}


def engine_metrics() -> set[str]:
    counters = {f"vllm:kvstore_{name}_total" for name in COUNTERS}
    return counters | {f"vllm:kvstore_{name}" for name in GAUGES}


def names_in(script: ModuleType) -> set[str]:
    text = json.dumps(script.dashboard())
    return set(re.findall(r"(?:vllm:kvstore|kvstore|process)_[a-z_]+", text))


def test_every_metric_on_the_dashboard_exists(script: ModuleType) -> None:
    known = set().union(*(names for _, names in daemon_metrics())) | engine_metrics()
    assert names_in(script) <= known


def test_every_metric_of_the_daemon_is_on_the_dashboard(script: ModuleType) -> None:
    shown = names_in(script)
    missing = {
        family
        for family, names in daemon_metrics()
        if family.startswith("kvstore_") and not names & shown
    }
    assert missing == set()


def test_the_committed_dashboard_is_up_to_date(script: ModuleType) -> None:
    assert script.OUTPUT.read_text() == script.render(), "run: python dashboards/generate.py"


def test_panels_have_numbers_and_places_of_their_own(script: ModuleType) -> None:
    panels = script.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
