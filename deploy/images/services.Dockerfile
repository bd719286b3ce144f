# The images of the services: one build stage, and for each program an image that contains only this program.
#   docker build -f deploy/images/services.Dockerfile --target gateway -t spool/gateway .
# deploy/compose.yaml builds all of them. They do not need BuildKit, so the builder of any engine can build them.
ARG GO_IMAGE=golang:1.26-bookworm
FROM ${GO_IMAGE} AS build
COPY deploy/images/ca/ /usr/local/share/ca-certificates/
RUN update-ca-certificates
# Where modules come from; empty means Go's default.
ARG GOPROXY=
ARG GOSUMDB=
ARG GOFLAGS=
ENV CGO_ENABLED=0
WORKDIR /src

# Dependencies change rarely, so they are compiled in their own layer before the sources are copied.
COPY go.work go.work.sum ./
COPY pkg/go.mod pkg/go.sum pkg/
COPY services/gateway/go.mod services/gateway/go.sum services/gateway/
COPY services/session/go.mod services/session/go.sum services/session/
COPY services/executor/go.mod services/executor/go.sum services/executor/
COPY services/projector/go.mod services/projector/go.sum services/projector/
COPY services/skills/go.mod services/skills/go.sum services/skills/
COPY cmd/go.mod cmd/go.sum cmd/
COPY web/go.mod web/
# Tests are not part of the image. Packages that are no longer needed are skipped.
RUN go work edit -dropuse=./test && go list -e -f '{{if not .Error}}{{.ImportPath}}{{end}}' \
      github.com/nats-io/nats-server/v2/server github.com/nats-io/nats.go/jetstream github.com/ThreeDotsLabs/watermill/message/router/middleware \
      github.com/jackc/pgx/v5/pgxpool github.com/jackc/pgx/v5/stdlib github.com/pressly/goose/v3 github.com/prometheus/client_golang/prometheus/promhttp \
      google.golang.org/grpc google.golang.org/grpc/health github.com/grpc-ecosystem/grpc-gateway/v2/runtime github.com/coder/websocket \
      github.com/docker/docker/client github.com/openai/openai-go/v3 github.com/alecthomas/kong \
    | xargs go build -trimpath

COPY pkg pkg
COPY services services
COPY cmd cmd
COPY web/*.go web/
COPY web/dist web/dist
# Empty means the architecture of the builder; `docker buildx build --platform` sets it.
ARG TARGETARCH=
# The architectures that sandboxes may have; empty means that of this image.
ARG RUNNERS=
RUN set -eu; \
    export GOARCH="${TARGETARCH:-$(go env GOHOSTARCH)}"; \
    go build -trimpath -ldflags "-s -w" -o /out/ ./cmd/spool ./cmd/mockllm ./services/gateway/cmd/gateway ./services/session/cmd/session \
      ./services/executor/cmd/executor ./services/executor/cmd/egress ./services/projector/cmd/projector ./services/session/cmd/janitor ./services/skills/cmd/skills; \
    for arch in ${RUNNERS:-$GOARCH}; do \
      GOARCH="$arch" go build -trimpath -ldflags "-s -w" -o "/out/runners/runner-linux-$arch" ./cmd/runner; \
    done
# The other files of the images: users and groups, trusted certificates, and folders that belong to the program's user.
RUN set -eu; mkdir -p /rootfs/etc/ssl/certs /rootfs/tmp /rootfs/var/lib/spool/egress /rootfs/var/lib/spool/scratch /rootfs/var/lib/spool/secrets/private /rootfs/var/lib/spool/secrets/public /rootfs/var/lib/spool/certificates/gateway /rootfs/var/lib/spool/certificates/egress /rootfs/run/spool/sandboxes /rootfs/run/spool/admin; \
    printf 'root:x:0:0:root:/:/nonexistent\nspool:x:10001:10001:spool:/var/lib/spool:/nonexistent\n' > /rootfs/etc/passwd; \
    printf 'root:x:0:\nspool:x:10001:\n' > /rootfs/etc/group; \
    cp /etc/ssl/certs/ca-certificates.crt /rootfs/etc/ssl/certs/; \
    chmod 1777 /rootfs/tmp; chown -R 10001:10001 /rootfs/var/lib/spool /rootfs/run/spool; chmod 0750 /rootfs/var/lib/spool /rootfs/run/spool/admin

FROM scratch AS base
COPY --from=build /rootfs/ /
ARG VERSION=dev
ARG REVISION=
LABEL org.opencontainers.image.vendor="Spool" \
      org.opencontainers.image.source="https://github.com/spoolhq/spool" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/
WORKDIR /var/lib/spool
USER 10001:10001

FROM base AS session
LABEL org.opencontainers.image.title="spool-session" org.opencontainers.image.description="Manages sessions: commands, queue, timers."
COPY --from=build /out/session /session
ENTRYPOINT ["/session"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["/session", "health"]

FROM base AS janitor
LABEL org.opencontainers.image.title="spool-janitor" org.opencontainers.image.description="Permanently removes the content of deleted sessions."
COPY --from=build /out/janitor /janitor
ENTRYPOINT ["/janitor"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["/janitor", "health"]

FROM base AS projector
LABEL org.opencontainers.image.title="spool-projector" org.opencontainers.image.description="Folds the log into the read models in Postgres."
COPY --from=build /out/projector /projector
ENTRYPOINT ["/projector"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["/projector", "health"]

FROM base AS skills
LABEL org.opencontainers.image.title="spool-skills" org.opencontainers.image.description="Checks and stores skills."
COPY --from=build /out/skills /skills
ENTRYPOINT ["/skills"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["/skills", "health"]

FROM base AS gateway
LABEL org.opencontainers.image.title="spool-gateway" org.opencontainers.image.description="Serves clients: REST, SSE, WebSocket and gRPC."
COPY --from=build /out/gateway /gateway
EXPOSE 7700 7701
ENTRYPOINT ["/gateway"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["/gateway", "health"]

FROM base AS executor
LABEL org.opencontainers.image.title="spool-executor" org.opencontainers.image.description="Runs agents: claims executions, runs their sandboxes, and stores their events in the log."
COPY --from=build /out/executor /executor
COPY --from=build /out/runners/ /runners/
ENV SPOOL_RUNNER=/runners
ENTRYPOINT ["/executor"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["/executor", "health"]

FROM base AS egress
LABEL org.opencontainers.image.title="spool-egress" org.opencontainers.image.description="Egress proxy of sandboxes: allowlists, credentials, metering."
COPY --from=build /out/egress /egress
ENTRYPOINT ["/egress"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=10s --retries=3 CMD ["/egress", "health"]

FROM base AS mockllm
LABEL org.opencontainers.image.title="spool-mockllm" org.opencontainers.image.description="A scripted model server, for trying Spool and testing it without a key."
COPY --from=build /out/mockllm /mockllm
ENV SPOOL_MOCKLLM_LISTEN=0.0.0.0:7799
EXPOSE 7799
ENTRYPOINT ["/mockllm"]
HEALTHCHECK --interval=5s --timeout=10s --start-period=10s --retries=3 CMD ["/mockllm", "health"]

FROM base AS spool
LABEL org.opencontainers.image.title="spool" org.opencontainers.image.description="The command line: provision, verify, rebuild, doctor, and client commands."
COPY --from=build /out/spool /spool
ENTRYPOINT ["/spool"]
