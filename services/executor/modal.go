package executor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/modal"
)

// checkModal checks the settings of Modal sandboxes, and sets those that follow from others.
func (c Config) checkModal() (Config, error) {
	if c.Sandbox != Modal {
		return c, nil
	}
	if err := c.checkPrice(); err != nil {
		return c, err
	}
	c.Engine = cmp.Or(c.Engine, "modal-"+c.ModalApp)
	if c.ModalTokenSecretFile != "" {
		if c.ModalTokenSecret != "" {
			return c, errors.New("modal-token-secret and modal-token-secret-file: set one of them")
		}
		text, err := os.ReadFile(c.ModalTokenSecretFile)
		if err != nil {
			return c, fmt.Errorf("modal-token-secret-file: %w", err)
		}
		c.ModalTokenSecret, c.ModalTokenSecretFile = strings.TrimSpace(string(text)), ""
	}
	cfg, err := c.modal(nil)
	if err != nil {
		return c, err
	}
	return c, cfg.Check()
}

// modal returns the settings of the provider.
func (c Config) modal(log *slog.Logger) (modal.Config, error) {
	images, err := imagepolicy.Parse("sandbox-images", c.SandboxImages)
	if err != nil {
		return modal.Config{}, err
	}
	remote, err := c.remoteEgress()
	if err != nil {
		return modal.Config{}, err
	}
	out := modal.Config{
		TokenID: c.ModalTokenID, TokenSecret: c.ModalTokenSecret, ServerURL: c.ModalServerURL, Environment: c.ModalEnvironment,
		App: c.ModalApp, Region: c.ModalRegion, Engine: c.Engine, Runner: c.Runner, Image: c.ModalImage, Images: images,
		Limits: sandbox.Limits{MemoryBytes: c.SandboxMemory, CPUs: c.SandboxCPUs, DiskBytes: c.SandboxDisk}, Timeout: c.ModalTimeout, Logger: log,
	}
	out.Egress.Server, out.Egress.Authority = remote.Server, remote.Authority
	return out, nil
}

// verifyModal asks Modal whether it accepts the settings. If Modal does not answer, the first sandbox reports wrong
// settings.
func (e *Executor) verifyModal(ctx context.Context) error {
	p, ok := e.own.(*modal.Provider)
	if !ok {
		return nil
	}
	err := p.Verify(ctx)
	var typed *sandbox.Error
	if errors.As(err, &typed) && typed.Code == sandbox.CodeEngineUnavailable {
		e.deps.Logger.Warn("Modal does not answer: its settings are not verified yet", "error", err)
		return nil
	}
	return err
}

// ProveModal asks Modal whether it accepts the token, the environment, the app and the image. It returns one sentence
// for each step that succeeded.
func (c Config) ProveModal(ctx context.Context, log *slog.Logger) ([]string, error) {
	c.Sandbox = Modal
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	if c, err = c.withRunner(); err != nil {
		return nil, err
	}
	cfg, err := c.modal(log)
	if err != nil {
		return nil, err
	}
	p, err := modal.New(cfg)
	if err != nil {
		return nil, err
	}
	found, err := p.Prove(ctx)
	return found, errors.Join(err, p.Close())
}

// CheckEgressListener returns an error that names the setting if the egress proxy would have no TLS listener, to which
// sandboxes on Modal connect. getenv returns the proxy's settings by the names of their variables.
func CheckEgressListener(getenv func(string) string) error {
	for _, name := range []string{"SPOOL_EGRESS_LISTEN_TLS", "SPOOL_EGRESS_TLS_CERTIFICATE", "SPOOL_EGRESS_TLS_KEY"} {
		if getenv(name) == "" {
			return fmt.Errorf("%s: it is empty, and sandboxes on Modal connect to the egress proxy's TLS listener: set it as described in docs/modal.md, \"Egress proxy\"", name)
		}
	}
	return nil
}

// checkPrice returns an error if the price of Modal sandboxes is invalid.
func (c Config) checkPrice() error {
	if p := c.ModalSandboxPrice; p < 0 || math.IsNaN(p) || math.IsInf(p, 0) {
		return fmt.Errorf("modal-sandbox-price: %g is not a number of dollars that is at least 0", p)
	}
	return nil
}

// rate returns the price of sandboxes. The time of Modal sandboxes is metered with or without a price.
func (c Config) rate() run.SandboxRate {
	if c.Sandbox != Modal {
		return run.SandboxRate{}
	}
	return run.SandboxRate{Provider: Modal, USDPerSecond: c.ModalSandboxPrice}
}

// sandboxLife returns the time after which the provider ends a sandbox; 0 means never.
func (c Config) sandboxLife() time.Duration {
	if c.Sandbox != Modal {
		return 0
	}
	return c.ModalTimeout
}
