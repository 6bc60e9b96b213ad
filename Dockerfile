# The CUDA image, for NVIDIA GPUs: `docker build -t prime-rl:cuda .`, see docs/guides/containers.md.
# Dockerfile.cpu is the same with locks/cpu.txt. CUDA itself comes with the packages; the host brings the driver.
FROM python:3.12-slim-bookworm AS build
COPY locks/build.txt /locks/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /locks/build.txt
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_CACHE_DIR=/uv-cache
COPY locks/cuda.txt /locks/
# All that is installed is in the lock, so nothing is resolved. Compiled here: the file system may be read-only later.
RUN --mount=type=cache,target=/uv-cache \
    uv venv /opt/venv && uv pip install --python /opt/venv --no-deps --require-hashes -r /locks/cuda.txt
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY environments environments
RUN uv build --wheel --no-build-isolation --python /usr/local/bin/python3 --out-dir /dist

FROM python:3.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --gid 0 --home-dir /cache --no-create-home prime \
    && install --directory --owner=1000 --group=0 --mode=2775 /cache /outputs
COPY --from=build /opt/venv /opt/venv
# The project by itself: a layer of a few MB where only the code has changed.
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    --mount=type=bind,from=build,source=/usr/local/bin/uv,target=/usr/local/bin/uv \
    UV_COMPILE_BYTECODE=1 uv pip install --no-cache --python /opt/venv --no-deps /dist/*.whl
WORKDIR /opt/prime-rl
COPY assets assets
COPY configs configs
COPY examples examples
COPY scripts scripts
# HOME: models and kernels are kept below it. USER: for any other --user, which has no name.
ENV PATH=/opt/venv/bin:$PATH HOME=/cache USER=prime PRIME_OUTPUT_DIR=/outputs PYTHONUNBUFFERED=1
VOLUME ["/cache", "/outputs"]
USER 1000:0
HEALTHCHECK --interval=30s --timeout=30s --start-period=10m --retries=3 CMD ["python", "/opt/prime-rl/scripts/container_health.py"]
ENTRYPOINT ["python", "-I", "/opt/prime-rl/scripts/container_entry.py"]
CMD ["rl", "--help"]
