"""The HTTP port ends at once, not when its thread looks the next time."""

import socket
import threading
from http.server import ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry

from kvstore.server.metrics_port import MetricsPort

LOOK_S = 120.0  # beyond what the test waits for


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_nobody_asks_is_closed_at_once(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = ThreadingHTTPServer.serve_forever
    monkeypatch.setattr(
        "kvstore.server.metrics_port.ThreadingHTTPServer.serve_forever",
        lambda server: serve(server, LOOK_S),
    )
    port = MetricsPort(
        host, 0, registry=CollectorRegistry(), not_alive=lambda: "", not_ready=lambda: ""
    )
    port.start()
    closing = threading.Thread(target=port.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.port), 1.0)
