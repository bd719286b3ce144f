package natsserver

import (
	"context"
	"slices"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/spoolhq/spool/pkg/retry"
)

const (
	// healthInterval is the interval at which the server's health is checked.
	healthInterval = time.Second
	// maxFailedChecks is the number of checks that fail in a row before the server is restarted. A stream that is being
	// created or deleted fails one.
	maxFailedChecks = 3
	// restartSpace is the free space, in bytes, of the store's disk that a restart needs. deploy/nats-watch has the same.
	restartSpace = 64 << 20
	// firstRestartPause and longestRestartPause are the pauses after a restart. They grow, because a disk that fails otherwise than by being full would fail again at once.
	firstRestartPause, longestRestartPause = time.Second, 15 * time.Second
)

// restartAfterWriteErrors restarts the server after a write error of a stream, as soon as the disk has free space,
// until ctx ends. After a write error, such as a full disk, the NATS server refuses each write to the stream until its
// next start. deploy/nats-watch does the same for containers.
func (s *Server) restartAfterWriteErrors(ctx context.Context) {
	pauses := retry.NewDoubling(firstRestartPause, longestRestartPause)
	failed := 0
	for pause := healthInterval; retry.Pause(ctx, pause) == nil; {
		pause = healthInterval
		reasons := s.newFailures()
		if len(reasons) == 0 {
			failed = 0
			continue
		}
		if failed++; failed < maxFailedChecks {
			continue
		}
		free, err := freeSpace(s.cfg.StoreDir)
		if failed == maxFailedChecks {
			s.logger.Error("streams cannot be written; the NATS server is restarted when its disk has space", "folder", s.cfg.StoreDir, "free", free, "needs", restartSpace, "errors", reasons)
		}
		if err != nil || free < restartSpace {
			continue
		}
		if err := s.restart(); err != nil {
			s.logger.Error("restart the NATS server after write errors", "error", err)
		} else {
			s.logger.Warn("the NATS server was restarted after write errors")
			failed = 0
		}
		pause = pauses.NextBackOff()
	}
}

// newFailures returns why streams cannot be used that could be used after the server's start; nil if there are none.
// Streams that failed at the start would fail at the next one too.
func (s *Server) newFailures() (reasons []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, reason := range failedStreams(s.nats) {
		if !slices.Contains(s.failedAtStart, reason) {
			reasons = append(reasons, reason)
		}
	}
	return reasons
}

// failedStreams returns why the server's JetStream, or its streams, cannot be used; nil if all of them can.
func failedStreams(ns *server.Server) (reasons []string) {
	for _, e := range ns.Healthz(&server.HealthzOptions{Details: true}).Errors {
		reasons = append(reasons, e.Error)
	}
	return reasons
}

// restart replaces the server with a new one on the same folder and port. Clients reconnect.
func (s *Server) restart() error {
	shutdownNow(s.current())
	return s.launch()
}
