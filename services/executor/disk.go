package executor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/services/executor/internal/docker"
)

// chooseDiskLimitTimeout is the maximum time for which the start of the executor waits until the provider has chosen how to
// enforce disk limits. The choice takes longer if the engine has to pull an image first; in that case it is repeated with the
// first sandbox.
const chooseDiskLimitTimeout = time.Minute

// diskLimiter is a provider that limits the disk usage of its sandboxes.
type diskLimiter interface {
	// ChooseDiskLimit tries the configured modes, and returns the one that enforces the limits.
	ChooseDiskLimit(ctx context.Context) (string, error)
	// DiskLimit returns the chosen mode, "" before the choice.
	DiskLimit() string
}

// diskLimiter returns the executor's provider as a diskLimiter, or nil if the provider does not limit the disk usage of
// sandboxes.
func (e *Executor) diskLimiter() diskLimiter {
	d, ok := e.own.(diskLimiter)
	if !ok {
		return nil
	}
	return d
}

// diskLimit returns the mode by which the provider enforces disk limits, such as loop or quota. It returns "" if the provider
// has not chosen a mode yet or does not limit the disk usage.
func (e *Executor) diskLimit() string {
	if d := e.diskLimiter(); d != nil {
		return d.DiskLimit()
	}
	return ""
}

// chooseDiskLimit makes the provider choose the mode by which it enforces disk limits. It returns an error if the engine
// cannot enforce limits in the configured mode. If the engine does not answer, it returns nil, and the creation of the first
// sandbox repeats the choice.
func (e *Executor) chooseDiskLimit(ctx context.Context) error {
	d := e.diskLimiter()
	if d == nil {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, chooseDiskLimitTimeout)
	defer cancel()
	_, err := d.ChooseDiskLimit(bounded)
	if err != nil && ctx.Err() == nil && !errors.Is(err, docker.ErrDiskLimit) {
		e.deps.Logger.Warn("the disk limit mode could not be chosen yet; the first sandbox tries again", "error", err)
		return nil
	}
	return err
}

// registerDiskLimit registers a gauge with a label for the mode. The gauge is 1 for the mode that enforces the disk limits,
// which limit returns, and 0 for all other modes.
func registerDiskLimit(r prometheus.Registerer, limit func() string) {
	for _, mode := range docker.DiskLimits()[1:] {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "spool_executor_sandbox_disk_limit", Help: "What enforces the disk limits of Docker sandboxes is 1, the others are 0; all are 0 while that is not known.",
			ConstLabels: prometheus.Labels{"mode": mode},
		}, func() float64 {
			if limit() == mode {
				return 1
			}
			return 0
		}))
	}
}

// ProveDiskLimit returns the mode that would enforce the disk limits of Docker sandboxes with the settings c. To find it,
// ProveDiskLimit tries the modes on the Docker engine. It removes everything that it created there.
func (c Config) ProveDiskLimit(ctx context.Context, log *slog.Logger) (mode string, err error) {
	c.Sandbox, c.Engine = ProviderDocker, "doctor"
	if c, err = c.withDefaults(); err != nil {
		return "", err
	}
	if c, err = c.withRunnerPath(); err != nil {
		return "", err
	}
	try := func(use func(*docker.Provider) error) error {
		p, err := c.newProvider(log)
		if err != nil {
			return err
		}
		d, ok := p.(*docker.Provider)
		if !ok {
			return fmt.Errorf("sandbox: %s has no disk limits", c.Sandbox)
		}
		return errors.Join(use(d), d.Close())
	}
	err = try(func(p *docker.Provider) error {
		mode, err = p.ChooseDiskLimit(ctx)
		return err
	})
	if err != nil {
		return "", err
	}
	return mode, try(func(p *docker.Provider) error { // this provider does not use the runner's volume
		_, err := p.RemoveOrphans(ctx, 0)
		return err
	})
}
