# The image of all steps, the Ray pods and the MLflow server. `make image` builds it; docs/cluster/install.md explains how.
#
#   BASE      base image with Debian 12 and Python 3.11 as python3; docker/build.sh requires its digest
#   VARIANT   build of torch: cpu, or cuda, which also has the compiler that torch needs on GPUs
#   PACKAGES  additional Debian packages of the cuda variant; the default is what NCCL needs for InfiniBand and RoCE
ARG BASE
ARG VARIANT=cpu

FROM ${BASE} AS cpu-system

FROM ${BASE} AS cuda-system
ARG PACKAGES="libibverbs1 ibverbs-providers"
# torch.compile and Triton compile at run time and need Python's headers. Debian's stable release fixes the versions.
# hadolint ignore=DL3008,SC2086
RUN apt-get update && apt-get install --yes --no-install-recommends g++ ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/log/* \
    && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && { test -f "$headers/Python.h" || { echo "BASE has no $headers/Python.h: python3-dev in PACKAGES"; exit 1; }; }

# Install the dependencies exactly as locked. pip has its own venv, which is not copied, so the image cannot install packages.
FROM ${BASE} AS dependencies
ARG VARIANT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PYTHON=/opt/venv/bin/python PATH=/opt/pip/bin:$PATH
# With these variables, compiled files contain the hash of their source instead of its time, so that builds are reproducible.
ENV SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
WORKDIR /src
COPY docker/build.lock docker/torch-${VARIANT}.lock docker/
RUN pip install --require-hashes --no-deps -r docker/build.lock -r docker/torch-${VARIANT}.lock
COPY docker/requirements.lock docker/
# Some packages are pure Python sources. Build them with the packages of build.lock only.
RUN pip install --require-hashes --no-deps --no-build-isolation --use-pep517 -r docker/requirements.lock

# Our package has its own layer, so that the layers of the dependencies stay cached here and on the nodes.
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
# KubeRay can start Ray in a login shell, which sets its own PATH and then reads profile.d. useradd records a date, so the
# date is fixed too.
RUN SOURCE_DATE_EPOCH=315532800 useradd --create-home --uid 10001 --shell /bin/bash app \
    && echo "PATH=/opt/venv/bin:\$PATH" > /etc/profile.d/venv.sh
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /code/opt/venv /opt/venv
COPY --from=code /src/sbom.cdx.json /app/
COPY configs /app/configs
WORKDIR /app
# Write no .pyc files, because the root is read-only. Do not buffer log lines.
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Store what torch compiles in a directory in which any user may write and execute files.
ENV TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
ARG VARIANT
ARG VERSION=unknown
ARG REVISION=unknown
# MLflow shows the commit of each run.
ENV INFOXLM_COMMIT=${REVISION}
LABEL org.opencontainers.image.title="infoxlm" \
      org.opencontainers.image.description="From text in many languages to an evaluated cross-lingual encoder (${VARIANT})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      infoxlm.sbom="/app/sbom.cdx.json"
USER 10001:10001
ENTRYPOINT ["infoxlm"]
