"""`make demo-native`: vLLM's own offloading and kvstore, turn by turn in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore_bench.demo.asker import Side
from kvstore_bench.demo.book import Book, share
from kvstore_bench.demo.course import Course
from kvstore_bench.demo.engine import EngineSpec, with_kvstore
from kvstore_bench.demo.ratios import ratio_of_medians
from kvstore_bench.demo.verdict import Check, Verdict

# Both are far below recompute; within this much, one is not slower than the other.
NOT_SLOWER = 1.05


class NativeCourse(Course):
    """Conversations grow on engines without connector, with vLLM's offloading, and with kvstore."""

    def run(self) -> None:
        """Run both phases."""
        plain_spec = self.plan.spec("plain", self.workload, small=True)
        self.progress.say("starting the daemon and three engines")
        dram_nbytes = self.plan.dram_nbytes(self.workload)
        daemon = self.stage.daemon(dram_nbytes=dram_nbytes)
        plain, native, cached = self.stage.engines(
            [
                plain_spec,
                with_native_offloading(plain_spec, dram_nbytes),
                with_kvstore(plain_spec, "cached", daemon.target),
            ]
        )
        self.asker.warm_up(plain, native, cached)
        answer = self.workload.shape.answer_tokens
        with self.book.counting("none", plain):
            self.asker.ask(
                "first turns, nothing stored",
                self.workload.turns(1, 1),
                Side("native_cold", native, answer),
                Side("cold", cached, answer),
                record="cold",
            )
            self.asker.ask(
                "resumed turns",
                self._resumed,
                Side("native_cold", native, answer),
                Side("none", plain, answer),
                Side("cold", cached, answer),
                record="none",
            )
        plain.child.stop()
        with self.book.counting("native", native), self.book.counting("dram", cached, daemon):
            self.asker.repeat(
                "resumed turns, again", self._resumed, Side("native", native), Side("dram", cached)
            )


def with_native_offloading(spec: EngineSpec, nbytes: int) -> EngineSpec:
    """Return the same engine with vLLM's OffloadingConnector and so many bytes of DRAM."""
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": nbytes},
    }
    if not spec.machine.gpu:
        connector["kv_connector_extra_config"] = {
            "cpu_bytes_to_use": nbytes,
            "spec_name": "HostSpec",
            "spec_module_path": "kvstore_bench.demo.native_spec",
        }
    return replace(spec, name="native", connector=connector)


def headline(book: Book) -> dict[str, float | None]:
    """Return the numbers of the comparison, ours beside vLLM's own."""
    none, ours, native = (book.ttfts(phase) for phase in ("none", "dram", "native"))
    return {
        "native_ttft_ratio_dram": ratio_of_medians(native, none),
        "ttft_ratio_dram": ratio_of_medians(ours, none),
        "ttft_ours_vs_native_dram": ratio_of_medians(ours, native),
        "native_ttft_ratio_growing": ratio_of_medians(book.ttfts("native_cold"), none),
        "ttft_ratio_growing": ratio_of_medians(book.ttfts("cold"), none),
        "loaded_native": share(book.counts["native"], "external_kv_transfer"),
        "loaded_dram": share(book.counts["dram"], "external_kv_transfer"),
    }


def judge(course: Course, leaks: Sequence[str]) -> Verdict:
    """Judge a finished comparison: ours must not be slower, on prompts that both really loaded."""
    numbers = headline(course.book)
    bounds = [
        ("ttft_ours_vs_native_dram", NOT_SLOWER, False),
        ("loaded_native", 0.95, True),
        ("loaded_dram", 0.95, True),
    ]
    found = [Check(name, numbers[name] or 0.0, limit, up) for name, limit, up in bounds]
    return Verdict(numbers, [*found, Check("leaks", len(leaks), 0, False)])
