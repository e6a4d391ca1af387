# An image of PyTorch workers: torch, Ray, the Python package of ZeroShard and its examples. From
# the root of the repository:
#
#     docker build -f deploy/torch.Dockerfile -t zeroshard-torch:0.2.0 .
#
# For training on your own, add your script, or mount it.
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm
ARG RUST_IMAGE=docker.io/library/rust:1.95-slim-bookworm

FROM ${RUST_IMAGE} AS build
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends --yes python3-pip && rm -rf /var/lib/apt/lists/*
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./client/python

FROM ${PYTHON_IMAGE}
# The probes of KubeRay call wget.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends --yes wget && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
# PIP_INDEX_URL, as a build argument, is the URL of a mirror of PyPI.
ARG PIP_INDEX_URL=https://pypi.org/simple
RUN pip install --no-cache-dir torch==2.15.0 numpy==2.4.6 "ray[train]==2.60.0" /wheels/*.whl && rm -rf /wheels
COPY client/python/examples /examples
RUN useradd --uid 65532 --create-home zeroshard
ENV HOME=/tmp PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
CMD ["python", "-c", "import zeroshard; print(zeroshard.__version__)"]
