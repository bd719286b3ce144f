package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

// errCancelled is returned when a control reached the execution before its agent was started.
var errCancelled = errors.New("the execution is cancelled")

// dependencyLayer returns the layer with the agent's dependencies, "" if it has none. While the layer is built, the log says so and controls are
// obeyed. An *references.Error ends the execution.
func (t *turn) dependencyLayer(ctx context.Context) (string, error) {
	if t.resolved == nil {
		return "", nil
	}
	set, err := dependency.Parse(t.resolved.Definition.Dependencies)
	if err != nil { // it was checked when the agent was applied
		return "", &references.Error{Code: sandbox.CodeDependenciesFailed, Err: fmt.Errorf("dependencies: %w", err)}
	}
	if set.Empty() {
		return "", nil
	}
	layerer, ok := t.w.deps.Sandbox.(sandbox.Layerer)
	if !ok {
		return "", &references.Error{Code: sandbox.CodeDependenciesUnavailable, Err: fmt.Errorf("sandboxes of provider %s cannot have dependencies", t.w.cfg.Provider)}
	}
	return t.awaitLayer(ctx, layerer, sandbox.Packages{Set: set, Image: t.Session.Life.Options.Image})
}

// awaitLayer waits for a layer.
func (t *turn) awaitLayer(ctx context.Context, layerer sandbox.Layerer, want sandbox.Packages) (string, error) {
	type answer struct {
		name string
		err  error
	}
	work, cancel := context.WithCancel(ctx)
	defer cancel()
	begun, done := make(chan struct{}, 1), make(chan answer, 1)
	go func() {
		var a answer
		a.err = t.w.sandboxes.Retry(work, t.Session.ID, func() (err error) {
			a.name, err = layerer.Layer(work, want, t.w.workshop(func() {
				select {
				case begun <- struct{}{}:
				default: // Retry has called it again
				}
			}))
			return err
		})
		if a.err != nil && work.Err() == nil {
			a.err = dependencyError(a.err)
		}
		done <- a
	}()
	tick := time.NewTicker(t.w.cfg.Beat)
	defer tick.Stop()
	var since time.Time
	stop := func(err error) (string, error) {
		cancel()
		<-done
		return "", err
	}
	for {
		select {
		case a := <-done:
			if a.err == nil && !since.IsZero() {
				a.err = t.AppendFacts(ctx, events.Log{Level: "info", Stream: "runner", Message: fmt.Sprintf("dependencies are installed, after %s: %s", t.w.deps.Now().Sub(since).Round(time.Millisecond), want)})
			}
			return a.name, a.err
		case <-begun:
			if since.IsZero() {
				since = t.w.deps.Now()
				if err := t.AppendFacts(ctx, events.Log{Level: "info", Stream: "runner", Message: fmt.Sprintf("dependencies are being installed, for the first time on this engine: %s", want)}); err != nil {
					return stop(err)
				}
			}
			continue
		case <-bus.Draining(ctx):
			return stop(errStopping)
		case <-t.changed:
		case <-tick.C:
		}
		if err := t.Refresh(ctx); err != nil {
			return stop(err)
		}
		if t.Control().N > 0 {
			return stop(errCancelled)
		}
	}
}

// unlessCancelled runs work that may last long, before the agent is started. The work is ended early by a control of the execution (errCancelled) and
// when this executor stops (errStopping). It must not use the turn's state.
func (t *turn) unlessCancelled(ctx context.Context, work func(context.Context) error) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- work(inner) }()
	stop := func(err error) error {
		cancel()
		<-done
		return err
	}
	tick := time.NewTicker(t.w.cfg.Beat)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-bus.Draining(ctx):
			return stop(errStopping)
		case <-t.changed:
		case <-tick.C:
		}
		if err := t.Refresh(ctx); err != nil {
			return stop(err)
		}
		if t.Control().N > 0 {
			return stop(errCancelled)
		}
	}
}

// dependencyError returns the *references.Error of dependencies that cannot be installed.
func dependencyError(err error) error {
	code := sandbox.CodeDependenciesFailed
	var typed *sandbox.Error
	if errors.As(err, &typed) {
		code = typed.Code
	}
	return &references.Error{Code: code, Err: err}
}

// Registries are what a sandbox may reach while dependencies are installed.
type Registries struct {
	Hosts  []string // entries of an allowlist
	Routes []string // of the egress proxy
}

// workshop returns how sandboxes are created in which layers are built. begun is called when one is needed.
func (w *Worker) workshop(begun func()) sandbox.Workshop {
	shop := sandbox.Workshop{Begun: begun}
	if w.deps.Egress != nil {
		shop.Build = func(ctx context.Context, spec sandbox.Spec, work func(context.Context, sandbox.Sandbox) error) error {
			return w.pool.Build(ctx, spec, w.cfg.Registries.Hosts, &w.cfg.Registries.Routes, work)
		}
	}
	return shop
}
