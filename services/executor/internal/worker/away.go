package worker

import (
	"context"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// unavailable reports whether an error is an engine that is away, or its egress proxy, or an engine that refuses for a reason which
// an operator can end: none of them says that a sandbox is lost.
func unavailable(err error) bool {
	var typed *sandbox.Error
	if !errors.As(err, &typed) {
		return false
	}
	switch typed.Code {
	case sandbox.CodeEngineUnavailable, sandbox.CodeEgressUnavailable, sandbox.CodeQuotaExceeded, sandbox.CodeCredentialsRefused:
		return true
	}
	return false
}

// awayPause is the wait between two tries to reach what is away.
const awayPause = time.Second

// patiently tries again while the engine or its proxy is away, for as long as engines are waited for.
func (w *Worker) patiently(ctx context.Context, sandbox string, try func() error) error {
	began := time.Now()
	for {
		err := try()
		if err == nil || !unavailable(err) || time.Since(began) > w.cfg.EngineGone {
			return err
		}
		w.d.Logger.Warn("the engine or its egress proxy is away, trying again", "sandbox", sandbox, "error", err)
		select {
		case <-time.After(awayPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// hopeless tells whether trying again will not help, and the code of why.
func hopeless(err error) (code string, final bool) {
	var typed *sandbox.Error
	switch {
	case errors.As(err, &typed):
		return typed.Code, !unavailable(err)
	case errors.Is(err, sandbox.ErrNotFound):
		return "SNAPSHOT_FAILED", true
	}
	return "", false
}
