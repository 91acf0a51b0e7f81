# syntax=docker/dockerfile:1
# Two images: `api`, the control plane alone, and `dataplane`, with Mooncake: storage node, master, agent, replay.
#
#   docker build --target api -t caketin/api:0.1.0 .
#   docker build --target dataplane -t caketin/dataplane:0.1.0 .
#
# BASE may be any Debian 12 with Python 3.11 in its archive; production pins it by digest. For the CUDA builds of
# Mooncake: --build-arg MOONCAKE=cuda12 (or cuda13) and as BASE an image of Debian 12 that has CUDA's libraries.
ARG BASE=debian:12.12-slim

FROM ${BASE} AS python
ENV LANG=C.UTF-8 \
    PATH=/opt/caketin/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates=20* python3=3.11.* \
 && rm -rf /var/lib/apt/lists/*

# What changes seldom first: dependencies, from pyproject.toml and in the versions of constraints.txt, which also
# hold for what builds the wheel.
FROM python AS dependencies
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv=3.11.* \
 && rm -rf /var/lib/apt/lists/*
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['server'], sep='\n')" > server.txt \
 && python3 -m venv /opt/caketin \
 && /opt/caketin/bin/pip install -r server.txt

FROM dependencies AS dependencies-dataplane
# cpu, cuda12 or cuda13: extras of pyproject.toml, each of which names one exact version of Mooncake.
ARG MOONCAKE=cpu
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['optional-dependencies']['${MOONCAKE}'], sep='\n')" > mooncake.txt \
 && /opt/caketin/bin/pip install -r mooncake.txt

# Nothing stays that the program does not need: no pip, no setuptools.
FROM dependencies AS build-api
COPY README.md CHANGELOG.md LICENSE ./
COPY metadata metadata
COPY dataplane dataplane
COPY api api
COPY caketin caketin
RUN /opt/caketin/bin/pip install --no-deps . \
 && /opt/caketin/bin/pip uninstall -y pip setuptools

FROM dependencies-dataplane AS build-dataplane
COPY README.md CHANGELOG.md LICENSE ./
COPY metadata metadata
COPY dataplane dataplane
COPY api api
COPY caketin caketin
RUN /opt/caketin/bin/pip install --no-deps . \
 && /opt/caketin/bin/pip uninstall -y pip setuptools

FROM python AS dataplane
# curl asks the agent's socket; libibverbs and its providers are RDMA; Mooncake links against the last three.
RUN apt-get update \
 && apt-get install -y --no-install-recommends curl=7.88.* ibverbs-providers=44.0-* \
    libcurl4=7.88.* libibverbs1=44.0-* libnuma1=2.0.* \
 && rm -rf /var/lib/apt/lists/*
# A volume made here belongs to the program.
RUN install -d -o 10001 -g 10001 /var/lib/caketin /run/caketin
COPY --from=build-dataplane /opt/caketin /opt/caketin
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/tmp
LABEL org.opencontainers.image.title="caketin dataplane" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
EXPOSE 7411
HEALTHCHECK --interval=10s --timeout=4s --start-period=30s --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7411/healthz', timeout=3)"]
ENTRYPOINT ["caketin"]
CMD ["--help"]

FROM python AS api
RUN install -d -o 10001 -g 10001 /var/lib/caketin
COPY --from=build-api /opt/caketin /opt/caketin
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/tmp
LABEL org.opencontainers.image.title="caketin api" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
EXPOSE 7411
HEALTHCHECK --interval=10s --timeout=4s --start-period=30s --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7411/healthz', timeout=3)"]
ENTRYPOINT ["caketin"]
CMD ["serve"]
