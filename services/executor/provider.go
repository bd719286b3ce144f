package executor

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/spoolhq/spool/pkg/hostpath"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/landlock"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/docker"
	"github.com/spoolhq/spool/services/executor/internal/local"
	"github.com/spoolhq/spool/services/executor/internal/modal"
)

// newProvider returns the sandbox provider that the setting Sandbox names.
func (c Config) newProvider(log *slog.Logger) (sandbox.Provider, error) {
	switch c.Sandbox {
	case ProviderDocker:
		sockets := c.EgressSockets
		if c.startsEgressProxy() {
			sockets = docker.EgressVolume(c.Engine)
		}
		images, err := imagepolicy.Parse("sandbox-images", c.SandboxImages)
		if err != nil {
			return nil, err
		}
		users, err := docker.ParseUserRange(c.SandboxUIDs)
		if err != nil {
			return nil, fmt.Errorf("sandbox-uids: %w", err)
		}
		return docker.New(docker.Config{
			Host: c.DockerHost, Engine: c.Engine, Runner: c.Runner, Image: c.SandboxImage, Images: images, Pull: c.PullImages, Runtime: c.SandboxRuntime,
			Limits:    sandbox.Limits{MemoryBytes: c.SandboxMemory, CPUs: c.SandboxCPUs, PIDs: c.SandboxPIDs, DiskBytes: c.SandboxDisk},
			DiskLimit: c.DiskLimit, Files: c.SandboxFiles, TmpBytes: c.SandboxTmp, Users: users, EgressSockets: sockets, Layers: c.layerConfig(), Logger: log,
		})
	case ProviderLocal:
		private := append([]string{c.DataDir}, c.Private...)
		cfg := local.Config{
			Dir: c.DataDir, Runner: c.Runner, Engine: c.Engine, Layers: c.layerConfig(), Logger: log,
			HostPaths: hostpath.Policy{Roots: c.HostPaths, Private: private},
		}
		if err := c.CheckLandlock(); err == nil {
			cfg.Hidden = private
		} else {
			log.Warn("agents can open all files of this user, also Spool's keys: a local agent can approve its own calls", "reason", err)
		}
		return local.New(cfg)
	case ProviderModal:
		cfg, err := c.modalConfig(log)
		if err != nil {
			return nil, err
		}
		return modal.New(cfg)
	}
	return nil, fmt.Errorf("sandbox: %q is none of %s, %s and %s", c.Sandbox, ProviderLocal, ProviderDocker, ProviderModal)
}

// CheckLandlock returns nil if local sandboxes cannot open Spool's own files, or else why they can.
func (c Config) CheckLandlock() error {
	switch {
	case c.Landlock == LandlockOff:
		return errors.New("SPOOL_LOCAL_LANDLOCK is off")
	case !landlock.Supported():
		return landlock.ErrUnsupported
	}
	return nil
}
