# One image for every step, the Ray pods and the MLflow server. `make image` builds it; docs/cluster/install.md says how to pin it.
#
#   BASE      a Debian 12 with Python 3.11 as python3, by digest: docker/build.sh takes no other
#   VARIANT   cpu or cuda: which build of torch, and whether there is a compiler for what torch compiles on GPUs
#   PACKAGES  Debian's packages beside them in the cuda variant: by default what NCCL needs for InfiniBand and RoCE
ARG BASE
ARG VARIANT=cpu

FROM ${BASE} AS cpu-system

FROM ${BASE} AS cuda-system
ARG PACKAGES="libibverbs1 ibverbs-providers"
# torch.compile and Triton compile at run time, with Python's headers. The versions are those of Debian's stable release.
# hadolint ignore=DL3008,SC2086
RUN apt-get update && apt-get install --yes --no-install-recommends g++ ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/log/* \
    && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && { test -f "$headers/Python.h" || { echo "BASE has no $headers/Python.h: python3-dev in PACKAGES"; exit 1; }; }

# What others wrote, exactly as in the locks. pip stays behind in a venv of its own: the image can install nothing.
FROM ${BASE} AS dependencies
ARG VARIANT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PYTHON=/opt/venv/bin/python PATH=/opt/pip/bin:$PATH
# The same bytes each time: compiled files name their source's hash and not its time, which a builder may set later.
ENV SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
WORKDIR /src
COPY docker/build.lock docker/torch-${VARIANT}.lock docker/
RUN pip install --require-hashes --no-deps -r docker/build.lock -r docker/torch-${VARIANT}.lock
COPY docker/requirements.lock docker/
# Some of them come as source, pure Python: built with what build.lock has and nothing else.
RUN pip install --require-hashes --no-deps --no-build-isolation --use-pep517 -r docker/requirements.lock

# What we wrote, in a layer of its own: the layers before stay cached, here and on the nodes.
FROM dependencies AS code
ARG VARIANT
COPY pyproject.toml setup.py README.md LICENSE ./
COPY infoxlm_core infoxlm_core
COPY components components
COPY pipelines pipelines
COPY configs configs
RUN pip install --no-deps --no-build-isolation --root /code .
COPY docker/sbom.py docker/
RUN python3 docker/sbom.py "${VARIANT}" > sbom.cdx.json

FROM ${VARIANT}-system
# A login shell, which KubeRay may be told to use, starts from a PATH of its own. An account is made with a date.
RUN SOURCE_DATE_EPOCH=315532800 useradd --create-home --uid 10001 --shell /bin/bash app \
    && echo "PATH=/opt/venv/bin:\$PATH" > /etc/profile.d/venv.sh
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /code/opt/venv /opt/venv
COPY --from=code /src/sbom.cdx.json /app/
COPY configs /app/configs
WORKDIR /app
# Nothing is written beside the code (the root is read-only), and a log line is seen when it is written.
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# What torch compiles goes where any user may write, and may run what was written.
ENV TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
ARG VARIANT
ARG VERSION=unknown
ARG REVISION=unknown
# MLflow shows it beside each run.
ENV INFOXLM_COMMIT=${REVISION}
LABEL org.opencontainers.image.title="infoxlm" \
      org.opencontainers.image.description="From text in many languages to an evaluated cross-lingual encoder (${VARIANT})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      infoxlm.sbom="/app/sbom.cdx.json"
USER 10001:10001
ENTRYPOINT ["infoxlm"]
