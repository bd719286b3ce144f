# The image of sandboxes: programs for agents, and the agents' CLIs of scripts/agents. The runner is not part of the image: it is mounted as a volume.
#   docker build -f deploy/images/sandbox.Dockerfile -t spool/sandbox .
ARG DEBIAN_IMAGE=debian:bookworm-slim
FROM ${DEBIAN_IMAGE} AS agents
COPY deploy/images/ca/ /usr/local/share/ca-certificates/
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates nodejs npm && rm -rf /var/lib/apt/lists/*
# Registry of npm; empty means npm's default.
ARG NPM_CONFIG_REGISTRY=
ENV NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt
WORKDIR /opt/agents
COPY scripts/agents/package.json scripts/agents/package-lock.json ./
# npm installs only packages for this platform, but older versions ignore the C library, so packages for other libraries are removed. `npm ci`
# would refuse a lock file without the packages of other platforms, which not every registry has. Some packages copy their program from the
# platform's package, so equal large files become links. A CLI that does not run fails the build.
RUN set -eu; \
    [ -n "${NPM_CONFIG_REGISTRY}" ] || unset NPM_CONFIG_REGISTRY; \
    npm install --no-save --no-fund --no-audit --loglevel=error; \
    rm -rf /root/.npm; \
    for package in node_modules/*/package.json node_modules/@*/*/package.json; do \
      node -e 'const p = require(process.argv[1]); process.exit(p.libc && !p.libc.includes("glibc") ? 1 : 0)' "./$package" || rm -rf "${package%/package.json}"; \
    done; \
    find node_modules -type f -size +1M -printf '%s %p\n' | sort -n | while read -r size file; do \
      if [ "$size" = "${last:-}" ] && cmp -s "$first" "$file"; then ln -sfr "$first" "$file"; else last=$size first=$file; fi; \
    done; \
    for cli in node_modules/.bin/*; do printf '%s ' "$cli"; HOME=/tmp "$cli" --version || exit 1; done; \
    rm -rf /tmp/* /tmp/.[!.]*
# npm for agents' dependencies: the newest version that runs on Debian's Node. As a Debian package, npm would add hundreds of packages.
ARG NPM_VERSION=10.9.4
RUN set -eu; \
    [ -n "${NPM_CONFIG_REGISTRY}" ] || unset NPM_CONFIG_REGISTRY; \
    npm install --no-save --no-fund --no-audit --loglevel=error --prefix /opt/npm "npm@${NPM_VERSION}"; \
    rm -rf /root/.npm; \
    node /opt/npm/node_modules/npm/bin/npm-cli.js --version

FROM ${DEBIAN_IMAGE}
COPY deploy/images/ca/ /usr/local/share/ca-certificates/
# Additional Debian packages for agents.
ARG PACKAGES=
RUN set -eu; \
    apt-get update; \
    apt-get install -y --no-install-recommends bash ca-certificates curl e2fsprogs git less nodejs openssh-client patch procps python3 python3-pip python3-venv ripgrep unzip ${PACKAGES}; \
    rm -rf /var/lib/apt/lists/* /usr/share/doc/* /usr/share/man/*; \
    groupadd --gid 10001 agent; \
    useradd --uid 10001 --gid 10001 --home-dir /home/spool --create-home --shell /bin/bash agent; \
    mkdir -p /workspace /mnt/workspace /spool/state; \
    chown 10001:10001 /workspace /mnt/workspace /spool/state; \
    # The dependencies of agents are mounted there. Node modules are searched in parent folders and not in NODE_PATH, and login shells reset PATH.
    ln -s /opt/spool/dependencies/node_modules /node_modules; \
    printf '%s\n' 'for dir in /opt/spool/dependencies/python/bin /opt/spool/dependencies/node_modules/.bin; do' \
      '  if [ -d "$dir" ]; then PATH=$dir:$PATH; fi' 'done' 'unset dir' >/etc/profile.d/spool-dependencies.sh; \
    ln -s /opt/npm/bin/npm-cli.js /usr/local/bin/npm; \
    ln -s /opt/npm/bin/npx-cli.js /usr/local/bin/npx; \
    # Remove set-user-ID and set-group-ID bits, which no agent needs.
    find / -xdev -type f -perm /6000 -exec chmod a-s {} +
COPY --from=agents /opt/agents/node_modules /opt/agents/node_modules
COPY --from=agents /opt/npm/node_modules/npm /opt/npm
ENV PATH=/opt/agents/node_modules/.bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/spool \
    LANG=C.UTF-8 \
    NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt
WORKDIR /workspace
USER 10001:10001
CMD ["bash"]
# These are last, so that a new revision does not rebuild the layers before them.
ARG VERSION=dev
ARG REVISION=
LABEL org.opencontainers.image.title="spool-sandbox" \
      org.opencontainers.image.description="Programs for agents: Python, Node, git, curl, and the agents' CLIs." \
      org.opencontainers.image.vendor="Spool" \
      org.opencontainers.image.source="https://github.com/spoolhq/spool" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
