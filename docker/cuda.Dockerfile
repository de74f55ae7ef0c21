# A worker with llama.cpp for NVIDIA's GPUs; API and Flower need no GPU and come from Dockerfile. Built from the root:
#   docker build -f docker/cuda.Dockerfile -t genpool-worker-cuda .
# Needs a driver for CUDA 13 (580 or later) and the NVIDIA container toolkit where it runs, neither where it is built.
ARG CUDA_TAG=13.0.3
ARG UBUNTU=ubuntu24.04

# --- the compilers
FROM nvidia/cuda:${CUDA_TAG}-devel-${UBUNTU} AS build
ENV VENV=/opt/genpool \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INPUT=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY docker/requirements/ requirements/
RUN python3 -m venv tools \
    && tools/bin/pip install --require-hashes -r requirements/build.txt

# The architectures of Ampere, Ada, Hopper and Blackwell; each adds minutes to the build. `native` needs a GPU here.
ARG CUDA_ARCHITECTURES="80-real;86-real;89-real;90-real;100-real;120"
ARG CMAKE_ARGS="-DGGML_CUDA=ON -DGGML_BLAS=OFF -DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"
# The driver's own library is not there while an image is built; it comes with the container toolkit.
RUN PATH="$PWD/tools/bin:$PATH" \
    CMAKE_ARGS="$CMAKE_ARGS -DCMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined" \
    tools/bin/pip wheel --no-deps --no-build-isolation --require-hashes --wheel-dir wheels -r requirements/llama.txt

# A layer of its own: the one before takes long, and changes with llama.cpp alone.
# hadolint ignore=DL3059
RUN python3 -m venv "$VENV" \
    && "$VENV/bin/pip" install --require-hashes -r requirements/worker.txt
COPY LICENSE README.md pyproject.toml genpool.py source/
COPY pool/ source/pool/
COPY tasks/ source/tasks/
COPY webapp/ source/webapp/
COPY workers/ source/workers/
RUN tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir wheels ./source \
    && "$VENV/bin/pip" install --no-deps --no-index wheels/llama_cpp_python-*.whl wheels/genpool-*.whl

# --- the worker: CUDA's libraries without its compilers
FROM nvidia/cuda:${CUDA_TAG}-runtime-${UBUNTU} AS worker
ENV VENV=/opt/genpool \
    CACHE=/var/cache/genpool \
    STATE=/var/lib/genpool \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INPUT=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HOME=/tmp \
    XDG_CACHE_HOME=/var/cache \
    XDG_STATE_HOME=/var/lib
ENV PATH="$VENV/bin:$PATH"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 genpool \
    && useradd --uid 10001 --gid genpool --no-create-home --home-dir /tmp --shell /usr/sbin/nologin genpool \
    && install --directory --owner=genpool --group=genpool --mode=0750 "$CACHE" "$STATE"
WORKDIR /etc/genpool
COPY --from=build /opt/genpool/ /opt/genpool/
USER 10001:10001
VOLUME ["/var/cache/genpool"]
ENTRYPOINT ["genpool"]
CMD ["worker", "smollm2-135m-q4"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=300s --retries=3 \
    CMD ["python", "-m", "tasks.health", "worker"]
