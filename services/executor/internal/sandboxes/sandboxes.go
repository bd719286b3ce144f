// Package sandboxes creates and ends the sandboxes of one engine, and waits for an engine that is unavailable.
package sandboxes

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Egress registers sandboxes with the egress proxy.
type Egress interface {
	// RegisterNew registers a sandbox that does not exist yet, with the token of its spec. The sandbox may reach the hosts of an
	// allowlist. routes are the only routes of the proxy that it may use; nil for all.
	RegisterNew(ctx context.Context, spec sandbox.Spec, allow []string, routes *[]string) error
	// Release ends the registration of a sandbox. It returns nil for an unknown sandbox.
	Release(ctx context.Context, sandbox string) error
}

// A Manager creates and ends sandboxes. It is safe for concurrent use.
type Manager struct {
	Provider sandbox.Provider
	Egress   Egress        // nil: sandboxes have the network of their provider
	Patience time.Duration // maximum time that RetryWhileUnavailable waits for an unavailable engine
	Logger   *slog.Logger

	// Created is called after each call of Provider.Create, with the duration of the call.
	Created func(ctx context.Context, took time.Duration, err error)
}

// Create registers a sandbox with the egress proxy and then creates the sandbox. It waits while the engine is unavailable. It sets
// spec.EgressToken.
func (m *Manager) Create(ctx context.Context, spec *sandbox.Spec, allow []string, routes *[]string) (sandbox.Sandbox, error) {
	if m.Egress != nil {
		spec.EgressToken = rand.Text()
		if err := m.RetryWhileUnavailable(ctx, spec.ID, func() error { return m.Egress.RegisterNew(ctx, *spec, allow, routes) }); err != nil {
			return nil, err
		}
	}
	began := time.Now()
	var box sandbox.Sandbox
	err := m.RetryWhileUnavailable(ctx, spec.ID, func() (err error) {
		box, err = m.Provider.Create(ctx, *spec)
		return err
	})
	m.Created(ctx, time.Since(began), err)
	return box, err
}

// Terminate ends a sandbox and its registration with the egress proxy. If wipe is true, it removes the workspace too.
func (m *Manager) Terminate(ctx context.Context, id string, wipe bool) error {
	err := m.Provider.Terminate(ctx, id, wipe)
	if m.Egress != nil {
		err = errors.Join(err, m.Egress.Release(ctx, id))
	}
	return err
}

// Resume resumes a paused sandbox. It does nothing if the sandbox is not paused or does not exist.
func (m *Manager) Resume(ctx context.Context, id string) error {
	p, ok := m.Provider.(sandbox.Pauser)
	if !ok {
		return nil
	}
	if err := p.Resume(ctx, id); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("resume sandbox %s: %w", id, err)
	}
	return nil
}

// KeepsWorkspaces reports whether the provider keeps the workspace of a session after the end of the session's sandbox.
func (m *Manager) KeepsWorkspaces() bool {
	_, ok := m.Provider.(sandbox.WorkspaceKeeper)
	return ok
}

// retryPause is the pause between two attempts of Manager.RetryWhileUnavailable.
const retryPause = time.Second

// RetryWhileUnavailable calls try until its error is no longer one that IsUnavailable reports, but not longer than Patience. It returns the
// last error. id names the sandbox in log messages.
func (m *Manager) RetryWhileUnavailable(ctx context.Context, id string, try func() error) error {
	began := time.Now()
	for {
		err := try()
		if err == nil || !IsUnavailable(err) || time.Since(began) > m.Patience {
			return err
		}
		m.Logger.Warn("the engine or its egress proxy is unavailable, trying again", "sandbox", id, "error", err)
		if retry.Pause(ctx, retryPause) != nil {
			return ctx.Err()
		}
	}
}

// IsUnavailable reports whether an error means that an engine or its egress proxy is unavailable, or that the engine refuses
// requests for a reason that an operator can remove. Such an error does not mean that a sandbox is lost.
func IsUnavailable(err error) bool {
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

// FinalCode returns the code of an error after which another attempt is useless, and false for any other error.
func FinalCode(err error) (code string, final bool) {
	var typed *sandbox.Error
	switch {
	case errors.As(err, &typed):
		return typed.Code, !IsUnavailable(err)
	case errors.Is(err, sandbox.ErrNotFound):
		return "SNAPSHOT_FAILED", true
	}
	return "", false
}
