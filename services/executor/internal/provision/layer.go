package provision

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

// dependencyLayer returns the name of the layer with the packages that the agent depends on, or "" if it depends on none. It blocks until
// the layer exists. If the layer must be built first, dependencyLayer records that in the log; a control ends the wait. A *references.Error
// means that the execution has to fail.
func (p *sandboxPreparation) dependencyLayer(ctx context.Context) (string, error) {
	set, err := dependency.Parse(p.Resolved.Definition.Dependencies)
	if err != nil { // it was checked when the agent was applied
		return "", &references.Error{Code: sandbox.CodeDependenciesFailed, Err: fmt.Errorf("dependencies: %w", err)}
	}
	if set.IsEmpty() {
		return "", nil
	}
	layerer, ok := p.Provider.(sandbox.LayerCreator)
	if !ok {
		return "", &references.Error{Code: sandbox.CodeDependenciesUnavailable, Err: fmt.Errorf("sandboxes of provider %s cannot have dependencies", p.ProviderName)}
	}
	return p.awaitLayer(ctx, layerer, sandbox.LayerPackages{PackageSet: set, Image: p.Session.Life.Options.Image})
}

// awaitLayer blocks until the layer with the packages want exists, which layerer builds if necessary, and returns the layer's name. Its
// errors are those of unlessCancelled and dependencyError.
func (p *sandboxPreparation) awaitLayer(ctx context.Context, layerer sandbox.LayerCreator, want sandbox.LayerPackages) (name string, err error) {
	begun := make(chan time.Time, 1)
	builder := p.layerBuilder(func() {
		select {
		case begun <- p.Now():
		default: // Retry has called it again
		}
	})
	session := p.Session.ID
	build := func(ctx context.Context) error {
		err := p.Sandboxes.RetryWhileUnavailable(ctx, session, func() (err error) {
			name, err = layerer.Layer(ctx, want, builder)
			return err
		})
		if err != nil && ctx.Err() == nil {
			err = dependencyError(err)
		}
		return err
	}
	var since time.Time
	err = p.unlessCancelled(ctx, build, begun, func(at time.Time) error {
		if !since.IsZero() {
			return nil
		}
		since = at
		return p.AppendFacts(ctx, events.Log{Level: "info", Stream: "runner", Message: fmt.Sprintf("dependencies are being installed, for the first time on this engine: %s", want)})
	})
	if err != nil {
		return "", err
	}
	if !since.IsZero() {
		err = p.AppendFacts(ctx, events.Log{Level: "info", Stream: "runner", Message: fmt.Sprintf("dependencies are installed, after %s: %s", p.Now().Sub(since).Round(time.Millisecond), want)})
	}
	return name, err
}

// dependencyError converts an error of the installation of dependencies to a *references.Error, which ends the execution. It returns other
// errors unchanged.
func dependencyError(err error) error {
	code := sandbox.CodeDependenciesFailed
	var typed *sandbox.Error
	if errors.As(err, &typed) {
		code = typed.Code
	}
	return &references.Error{Code: code, Err: err}
}

// layerBuilder returns the LayerBuilder with which a provider builds a dependency layer. If sandboxes reach the network only through the
// egress proxy, the LayerBuilder builds the layer in a sandbox that may reach the package registries. It calls begun when a build begins.
func (p *sandboxPreparation) layerBuilder(begun func()) sandbox.LayerBuilder {
	b := sandbox.LayerBuilder{Begun: begun}
	if p.Proxied {
		b.Build = func(ctx context.Context, spec sandbox.Spec, work func(context.Context, sandbox.Sandbox) error) error {
			return p.Pool.RunInBuildSandbox(ctx, spec, p.Registries.Hosts, &p.Registries.Routes, work)
		}
	}
	return b
}
