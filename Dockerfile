# One file for CPU and CUDA; docs/join.md says how the image is used.
#
#   docker build -t swarm .
#   docker build -t swarm:cuda --build-arg DEVICE=cuda .     # 5.6 GB; PyPI's torch brings CUDA with it
FROM docker.io/library/python:3.11.14-slim-bookworm AS base

FROM base AS build
# cpu or cuda; parts of pyproject.toml that are wanted besides; where CPU-only builds of torch are, if not on PyPI.
ARG DEVICE=cpu
ARG EXTRAS=dashboard,owner
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python -m venv /opt/swarm
ENV PATH=/opt/swarm/bin:$PATH
COPY pyproject.toml constraints.txt ./
# What it needs comes before its own code, whose changes then cost no download. Headers, and GPU kernels for what
# this torch was not built for, are of no use to who runs it.
RUN case "$DEVICE" in \
        cpu) sed -i 's/^torch==.*/&+cpu/' constraints.txt && index="${CPU_INDEX:+--extra-index-url=$CPU_INDEX}" ;; \
        cuda) sed -i 's/^torch==/torch===/' constraints.txt && index="" ;; \
        *) echo "DEVICE is cpu or cuda, not '$DEVICE'" >&2; exit 1 ;; \
    esac \
    && mkdir swarm peers && touch LICENSE README.md \
    && export PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt \
    && pip install --constraint constraints.txt ${index:+"$index"} ".[$EXTRAS]" \
    && modules=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
    && rm -rf "$modules/torch/include" "$modules/torch/test" \
    && built=$(python -c 'import torch; print("cuda" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu")') \
    && case "$built" in "$DEVICE"*) ;; *) echo "this torch is for $built, not for $DEVICE" >&2; exit 1 ;; esac \
    && find "$modules/bitsandbytes" -name '*.so' ! -name '*_cpu*' ! -name "*_$built*" -delete
COPY LICENSE README.md ./
COPY swarm swarm
COPY peers peers
# pip also compiles, which the user who runs it could not; then it has nothing more to do.
RUN pip install --no-deps --no-build-isolation --force-reinstall . \
    && pip uninstall --yes pip

FROM base
LABEL org.opencontainers.image.title="swarm" \
      org.opencontainers.image.description="Train one model on many unreliable machines, and lose nothing when they die" \
      org.opencontainers.image.licenses="Apache-2.0"
# /data is the one thing to keep: the identity and the cache. /join is where a volume can be put for --join-file.
RUN groupadd --gid 10001 swarm \
    && useradd --uid 10001 --gid swarm --home-dir /data --no-create-home --shell /usr/sbin/nologin swarm \
    && install --directory --owner swarm --group swarm --mode 0700 /data /join
COPY --from=build /opt/swarm /opt/swarm
COPY scripts/entrypoint /usr/local/bin/entrypoint
ENV PATH=/opt/swarm/bin:$PATH HOME=/data SWARM_CACHE=/data/cache
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 31337
# Ill: it hangs, its p2pd hangs, or it is not in the network. Three times in a row, so one slow answer is nothing.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["swarm", "health", "/tmp/health.sock"]
ENTRYPOINT ["entrypoint"]
CMD ["--help"]
