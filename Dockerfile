# syntax=docker/dockerfile:1
# Three targets: `cpu`, `cuda`, and `front`, which is HAProxy alone. No key, spec or data is ever
# copied into an image.

FROM python:3.11-slim AS base
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH \
    FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 RAY_USAGE_STATS_ENABLED=0 \
    FLWR_HOME=/home/fedsim/flwr FEDSIM_CACHE=/home/fedsim/cache OMP_NUM_THREADS=1
RUN useradd --create-home --uid 10001 fedsim \
    && python -m venv /opt/venv \
    # A named volume takes the owner of the folder that it is first mounted on.
    && for folder in keys/shared keys/server keys/front keys/ray keys/node-0 keys/node-1 keys/node-2 keys/node-3 \
        runs vault vaults/0 vaults/1 vaults/2 vaults/3 scored \
        shards/0 shards/1 shards/2 shards/3 shards/server data public; do mkdir -p "/srv/$folder"; done \
    && chown -R fedsim:fedsim /srv
WORKDIR /opt/fedsim
COPY pyproject.toml README.md LICENSE ./

FROM base AS front
RUN apt-get update \
    && apt-get install --yes --no-install-recommends haproxy \
    && rm -rf /var/lib/apt/lists/*
USER fedsim

FROM base AS fedsim
# In one command, so that torch and torchvision come from one release. The registry's own wheels run
# on a GPU and on a CPU; an index of wheels for a CPU alone makes a smaller image of `cpu`:
# --build-arg TORCH_INDEX=...
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision
COPY fedsim fedsim
COPY attacks attacks
COPY defenses defenses
COPY clients clients
COPY deploy/*.sh deploy/
RUN pip install .
USER fedsim
WORKDIR /home/fedsim

FROM fedsim AS cpu
USER fedsim

FROM fedsim AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER fedsim
