package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

const (
	// diskMeasureInterval is the interval at which the disk usage of an installer is measured.
	diskMeasureInterval = 3 * time.Second
	// exitProgramNotFound is the exit code of a shell for a program that does not exist.
	exitProgramNotFound = 127
)

// installEnv are the environment variables of installers. They put temporary files and caches on the sandbox's disk, which is
// removed with the sandbox.
var installEnv = map[string]string{
	"HTTP_PROXY": runner.EgressURL, "HTTPS_PROXY": runner.EgressURL, "http_proxy": runner.EgressURL, "https_proxy": runner.EgressURL,
	"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
	"TMPDIR": workspaceDir + "/tmp", "npm_config_cache": workspaceDir + "/npm",
}

// errInstallTimeout is the cancellation cause of an installation's context at its time limit.
var errInstallTimeout = errors.New("the time limit was reached")

// installPackages runs the installers of the wanted packages in a sandbox that fills a dependency layer. Processes that a package's
// script leaves running end with the sandbox.
func (p *Provider) installPackages(ctx context.Context, box sandbox.Sandbox, image string, want sandbox.LayerPackages) error {
	cfg := p.cfg.Layers
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Within, errInstallTimeout)
	defer cancel()
	for _, i := range cfg.Installers(want.PackageSet, layerDir) {
		var said layer.Tail
		code, err := p.runInstaller(ctx, box, i, &said)
		switch {
		case context.Cause(ctx) == errInstallTimeout: //nolint:errorlint // the cause is never wrapped
			return cfg.TimeoutError(said.String())
		case err != nil:
			return err
		case code == exitProgramNotFound:
			return layer.InstallError("image %s has no %s that could install them: %s", image, i.Name, layer.LastLines(said.String()))
		case code < 0:
			return layer.InstallError("%s was ended by a signal, as the kernel does where there is no memory left (SPOOL_SANDBOX_MEMORY); it last said: %s", i.Name, layer.LastLines(said.String()))
		case code != 0:
			return layer.InstallError("%s ended with code %d; it last said: %s", i.Name, code, layer.LastLines(said.String()))
		}
	}
	// Other users must be able to read the layer, whatever permissions a package sets.
	if err := p.makeLayerReadable(ctx, box); err != nil {
		return err
	}
	size, _, err := measureLayer(ctx, box)
	if err == nil && size > cfg.MaxBytes {
		err = cfg.TooLargeError()
	}
	return err
}

// makeLayerReadable lets every user read the files of a dependency layer and search its folders.
func (p *Provider) makeLayerReadable(ctx context.Context, box sandbox.Sandbox) error {
	var said layer.Tail
	code, err := p.runInstaller(ctx, box, layer.Installer{Name: "chmod", Args: []string{"chmod", "-R", "a+rX", layerDir}}, &said)
	if err == nil && code != 0 {
		err = layer.InstallError("chmod ended with code %d; it last said: %s", code, layer.LastLines(said.String()))
	}
	return err
}

// runInstaller runs one installer in a sandbox and returns its exit code. It copies the installer's output to said. It kills the
// installer and returns an error if the installer writes too much to disk, or if ctx ends.
func (p *Provider) runInstaller(ctx context.Context, box sandbox.Sandbox, i layer.Installer, said *layer.Tail) (code int, err error) {
	proc, err := box.Exec(ctx, sandbox.Command{Args: append([]string{"sh", "-c", `mkdir -p "$TMPDIR" && exec "$@"`, "sh"}, i.Args...), Env: installEnv})
	if err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() {
		_ = proc.Stdin().Close() // a command that ended early has closed it
		var both sync.WaitGroup
		var errs [2]error
		for n, r := range []io.Reader{proc.Stdout(), proc.Stderr()} {
			both.Go(func() { _, errs[n] = io.Copy(said, r) })
		}
		both.Wait()
		var werr error
		code, werr = proc.Wait()
		ended <- errors.Join(errs[0], errs[1], werr)
	}()
	tick := time.NewTicker(diskMeasureInterval)
	defer tick.Stop()
	for {
		select {
		case err := <-ended:
			return code, err
		case <-ctx.Done():
			err = ctx.Err()
		case <-tick.C:
			// Twice the limit, because downloaded and unpacked files temporarily lie next to the layer.
			if _, all, werr := measureLayer(ctx, box); werr == nil && all > 2*p.cfg.Layers.MaxBytes {
				err = p.cfg.Layers.TooLargeError()
			}
		}
		if err != nil {
			if kerr := proc.Kill(); kerr != nil {
				p.cfg.Logger.Debug("an installer could not be ended, it ends with its sandbox", "sandbox", box.ID(), "error", kerr)
			}
			<-ended
			return 0, err
		}
	}
}

// measureLayer returns two sizes in bytes: that of a dependency layer, and that of everything that the layer's sandbox has written
// to disk.
func measureLayer(ctx context.Context, box sandbox.Sandbox) (size, all int64, err error) {
	proc, err := box.Exec(ctx, sandbox.Command{Args: []string{"du", "-sk", layerDir, workspaceDir}})
	if err != nil {
		return 0, 0, err
	}
	defer context.AfterFunc(ctx, func() { _ = proc.Kill() })() // it ends with its sandbox at the latest
	_ = proc.Stdin().Close()
	go func() { _, _ = io.Copy(io.Discard, proc.Stderr()) }() // errors about files that were removed meanwhile
	raw, err := io.ReadAll(proc.Stdout())
	if _, werr := proc.Wait(); err == nil {
		err = werr
	}
	if err != nil {
		return 0, 0, fmt.Errorf("measure the layer: %w", err)
	}
	var sizes []int64
	for line := range strings.Lines(string(raw)) {
		field, _, _ := strings.Cut(line, "\t")
		kib, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("measure the layer: du printed %.100q", raw)
		}
		sizes = append(sizes, kib<<10)
	}
	if len(sizes) != 2 {
		return 0, 0, fmt.Errorf("measure the layer: du printed %.100q", raw)
	}
	return sizes[0], sizes[0] + sizes[1], nil
}
