# kvstore in containers: the daemon, and a vLLM that has the connector.
#
#   docker build -t kvstore .                          the daemon
#   docker build -t kvstore-vllm --target vllm .       vLLM with the connector, from $VLLM_IMAGE
#
# deploy/compose.yaml runs the two together on one host, helm/kvstore on Kubernetes.
ARG PYTHON_IMAGE=python:3.12-slim
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
# The compiler of the native library, which codes records.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# The connector belongs into the engine's environment, in the same release as the daemon. The daemon
# shares its arena only with processes of its own user, so the engine runs as that user.
FROM ${VLLM_IMAGE} AS vllm
COPY --from=wheel /dist /tmp/dist
RUN python3 -m pip install --no-cache-dir /tmp/dist/*.whl && rm -r /tmp/dist \
 && useradd --system --uid 10001 --home-dir /models --shell /usr/sbin/nologin kvstore \
 && install -d -o kvstore -g kvstore /models
ENV HOME=/models
USER kvstore

FROM ${PYTHON_IMAGE} AS daemon
# security: daemons that show each other certificates seal records with it. For more:
# --build-arg EXTRAS=[object,security,otel]
ARG EXTRAS=[object,security]
COPY --from=wheel /dist /tmp/dist
RUN pip install --no-cache-dir "$(ls /tmp/dist/*.whl)${EXTRAS}" && rm -r /tmp/dist \
 && useradd --system --uid 10001 --home-dir /var/lib/kvstore --shell /usr/sbin/nologin kvstore \
 && install -d -o kvstore -g kvstore -m 0700 /run/kvstore /var/lib/kvstore
USER kvstore
# The socket and the blocks: where the daemon puts them unless told otherwise.
VOLUME ["/run/kvstore", "/var/lib/kvstore"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["kvstore", "ping"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvstore"]
CMD ["serve"]
