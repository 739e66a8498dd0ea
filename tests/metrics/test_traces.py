"""Spans of a real daemon, received as a collector receives them."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from kvstore import Client
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


class Collector(BaseHTTPRequestHandler):
    """Keeps the bodies of what is posted to /v1/traces."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.bodies = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_call_is_a_span_below_its_callers(collector: ThreadingHTTPServer) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    trace_id = os.urandom(16)
    parent = f"00-{trace_id.hex()}-{os.urandom(8).hex()}-01"
    keys = sample_keys("traced", 2)
    with Daemon(f"server.traces_endpoint={endpoint}") as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            client.put(client.register(sample_namespace()), keys, sample_records(keys))
        options = (("grpc.enable_http_proxy", 0),)
        with grpc.insecure_channel(daemon.target, options=options) as channel:
            stub, metadata = rpc.KVStoreStub(channel), (("traceparent", parent),)
            with pytest.raises(grpc.RpcError):
                stub.Match(pb.MatchRequest(namespace_id=b"short"), metadata=metadata)
        assert daemon.stop() == 0
    spans = {
        span.name: span
        for body in collector.bodies  # type: ignore[attr-defined]
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert {"kvstore/OpenSession", "kvstore/Reserve", "kvstore/Commit"} <= spans.keys()
    failed = spans["kvstore/Match"]
    assert failed.trace_id == trace_id
    assert {each.key: each.value.string_value for each in failed.attributes} == {
        "error.type": "InvalidRequest"
    }
    assert failed.end_time_unix_nano > failed.start_time_unix_nano


def test_a_collector_that_is_away_costs_nothing_but_its_spans() -> None:
    with Daemon("server.traces_endpoint=http://127.0.0.1:1/v1/traces") as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            assert client.admin.stats()["blocks"] == 0
        assert daemon.stop() == 0
