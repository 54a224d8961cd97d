# One image for every step, the Ray pods and the MLflow server. `make image` builds it; docs/cluster.md says how to pin it.
#
#   BASE     a Debian with Python 3.11 as python3; a release gives it with a digest
#   VARIANT  cpu or cuda: which build of torch
ARG BASE=python:3.11-slim-bookworm

# What others wrote, exactly as in the locks. pip stays behind in a venv of its own: the image can install nothing.
FROM ${BASE} AS dependencies
ARG VARIANT=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PYTHON=/opt/venv/bin/python PATH=/opt/pip/bin:$PATH
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
WORKDIR /src
COPY docker/build.lock docker/torch-${VARIANT}.lock docker/
RUN pip install --require-hashes --no-deps -r docker/build.lock -r docker/torch-${VARIANT}.lock
COPY docker/requirements.lock docker/
# Some of them come as source, pure Python: built with what build.lock has and nothing else.
RUN pip install --require-hashes --no-deps --no-build-isolation --use-pep517 -r docker/requirements.lock

# What we wrote, in a layer of its own: the layers before stay cached, here and on the nodes.
FROM dependencies AS code
COPY pyproject.toml README.md LICENSE ./
COPY infoxlm_core infoxlm_core
COPY components components
COPY pipelines pipelines
COPY configs configs
RUN pip install --no-deps --no-build-isolation --root /code .

FROM ${BASE}
# A login shell, which KubeRay may be told to use, starts from a PATH of its own.
RUN useradd --create-home --uid 10001 --shell /bin/bash app \
    && echo "PATH=/opt/venv/bin:\$PATH" > /etc/profile.d/venv.sh
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /code/opt/venv /opt/venv
COPY configs /app/configs
WORKDIR /app
# Nothing is written beside the code (the root is read-only), and a log line is seen when it is written.
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
ARG VARIANT=cpu
ARG VERSION=unknown
ARG REVISION=unknown
# MLflow shows it beside each run.
ENV INFOXLM_COMMIT=${REVISION}
LABEL org.opencontainers.image.title="infoxlm" \
      org.opencontainers.image.description="From text in many languages to an evaluated cross-lingual encoder (${VARIANT})" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
ENTRYPOINT ["infoxlm"]
