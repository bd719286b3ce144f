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

// checkModalSettings checks the settings of Modal sandboxes, and returns the config with the settings that follow from
// them.
func (c Config) checkModalSettings() (Config, error) {
	if c.Sandbox != ProviderModal {
		return c, nil
	}
	if err := c.checkSandboxPrice(); err != nil {
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
	cfg, err := c.modalConfig(nil)
	if err != nil {
		return c, err
	}
	return c, cfg.Check()
}

// modalConfig returns the configuration of the Modal provider.
func (c Config) modalConfig(log *slog.Logger) (modal.Config, error) {
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

// verifyModal asks Modal whether it accepts the settings. It returns nil if Modal does not answer; the creation of the
// first sandbox then reports wrong settings.
func (e *Executor) verifyModal(ctx context.Context) error {
	p, ok := e.own.(*modal.Provider)
	if !ok {
		return nil
	}
	err := p.VerifySettings(ctx)
	var typed *sandbox.Error
	if errors.As(err, &typed) && typed.Code == sandbox.CodeEngineUnavailable {
		e.deps.Logger.Warn("Modal does not answer: its settings are not verified yet", "error", err)
		return nil
	}
	return err
}

// ProveModal checks the settings at Modal: the token, the environment, the app and the image. It returns one sentence
// for each step that succeeded.
func (c Config) ProveModal(ctx context.Context, log *slog.Logger) ([]string, error) {
	c.Sandbox = ProviderModal
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	if c, err = c.withRunnerPath(); err != nil {
		return nil, err
	}
	cfg, err := c.modalConfig(log)
	if err != nil {
		return nil, err
	}
	p, err := modal.New(cfg)
	if err != nil {
		return nil, err
	}
	found, err := p.ProveSettings(ctx)
	return found, errors.Join(err, p.Close())
}

// CheckEgressListener returns an error that names the setting if the settings of an egress proxy configure no TLS
// listener, which sandboxes at Modal need. getenv returns the value of a variable with a setting of the proxy.
func CheckEgressListener(getenv func(string) string) error {
	for _, name := range []string{"SPOOL_EGRESS_LISTEN_TLS", "SPOOL_EGRESS_TLS_CERTIFICATE", "SPOOL_EGRESS_TLS_KEY"} {
		if getenv(name) == "" {
			return fmt.Errorf("%s: it is empty, and sandboxes on Modal connect to the egress proxy's TLS listener: set it as described in docs/modal.md, \"Egress proxy\"", name)
		}
	}
	return nil
}

// checkSandboxPrice returns an error if the configured price of Modal sandboxes is not valid.
func (c Config) checkSandboxPrice() error {
	if p := c.ModalSandboxPrice; p < 0 || math.IsNaN(p) || math.IsInf(p, 0) {
		return fmt.Errorf("modal-sandbox-price: %g is not a number of dollars that is at least 0", p)
	}
	return nil
}

// sandboxRate returns the price by which the running time of sandboxes is charged. The running time of Modal sandboxes
// is metered even without a price.
func (c Config) sandboxRate() run.SandboxRate {
	if c.Sandbox != ProviderModal {
		return run.SandboxRate{}
	}
	return run.SandboxRate{Provider: ProviderModal, USDPerSecond: c.ModalSandboxPrice}
}

// sandboxLife returns the time after which the provider ends a sandbox by itself; 0 means never.
func (c Config) sandboxLife() time.Duration {
	if c.Sandbox != ProviderModal {
		return 0
	}
	return c.ModalTimeout
}
