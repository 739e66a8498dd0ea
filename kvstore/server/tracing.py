"""One OpenTelemetry span a call, sent by OTLP over HTTP. Needs the extra kvstore-tiers[otel]."""

from __future__ import annotations

from typing import Any

from kvstore.model.errors import ConfigError

QUEUE_SPANS_MAX = 2048  # more are dropped: tracing may not hold the daemon up
EXPORT_S = 1.0


class Tracing:
    """Makes spans, children of the caller's where it sent a `traceparent`."""

    def __init__(self, endpoint: str, version: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"server.traces_endpoint needs OpenTelemetry ({error}): "
                "pip install 'kvstore-tiers[otel]'"
            ) from error
        about = Resource.create({"service.name": "kvstore", "service.version": version})
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._provider = TracerProvider(resource=about)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS_MAX)
        )
        self._tracer = self._provider.get_tracer("kvstore.server")
        self._parents = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    def start(self, method: str, metadata: Any) -> Any:
        """Return a span that begins now; `end` it."""
        carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
        parent = self._parents.extract(carrier)
        return self._tracer.start_span(f"kvstore/{method}", context=parent, kind=self._kind)

    def close(self) -> None:
        """Send what is queued. Blocks, EXPORT_S or little more."""
        self._provider.shutdown()


def fail(span: Any, error: Exception) -> None:
    """Mark a span as failed, with the class of the error."""
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, str(error))
    span.set_attribute("error.type", type(error).__name__)
