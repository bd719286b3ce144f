package local

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

const (
	// lockRetryInterval is the interval at which an executor tries to lock a dependency layer while another executor has the
	// lock.
	lockRetryInterval = 100 * time.Millisecond
	// diskMeasureInterval is the interval at which the disk usage of an installer is measured.
	diskMeasureInterval = 3 * time.Second
	// outputDrainTimeout is the maximum time for which the output of an installer is read after the installer has ended, if
	// processes that it started keep the output open.
	outputDrainTimeout = 2 * time.Second
)

var (
	_ sandbox.LayerCreator = (*Provider)(nil)

	// errInstallTimeout is the cancellation cause of an installation's context at its time limit.
	errInstallTimeout = errors.New("the time limit was reached")
)

// Layer returns the folder layers/<digest> in the provider's folder, into which it installs the packages unless they are
// there, with the npm and pip of this machine. The scripts of packages run without any restriction.
func (p *Provider) Layer(ctx context.Context, want sandbox.LayerPackages, use sandbox.LayerBuilder) (string, error) {
	base, err := p.runtimeVersions(ctx, want)
	if err != nil {
		return "", err
	}
	digest := want.LayerDigest(base, runtime.GOOS+"/"+runtime.GOARCH)
	if dir, err := p.completeLayer(digest); dir != "" || err != nil {
		return dir, err
	}
	if use.Begun != nil {
		use.Begun()
	}
	return p.layers.Do(ctx, digest, func(ctx context.Context) (string, error) { return p.createLayer(ctx, digest, want) })
}

// runtimeVersions returns the versions of Node and Python on this machine, for which the packages of a layer are built.
func (p *Provider) runtimeVersions(ctx context.Context, want sandbox.LayerPackages) (string, error) {
	var out []string
	for name, needed := range map[string]bool{"node": len(want.NPM) > 0, "python3": len(want.PIP) > 0} {
		if !needed {
			continue
		}
		path, err := lookPath(name, "", p.cfg.Path)
		if err != nil {
			return "", layer.InstallError("this machine has no %s on its PATH", name)
		}
		cmd := exec.CommandContext(ctx, path, "--version") //nolint:gosec // found by its own name
		cmd.Env = p.installEnv()
		said, err := cmd.CombinedOutput()
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if err != nil {
			return "", layer.InstallError("%s --version: %v: %s", name, err, layer.LastLines(string(said)))
		}
		out = append(out, name+" "+strings.TrimSpace(string(said)))
	}
	slices.Sort(out)
	return strings.Join(out, "\n"), nil
}

// layersDir returns the folder that contains all dependency layers.
func (p *Provider) layersDir() string { return filepath.Join(p.cfg.Dir, "layers") }

// layerLockPath returns the path of the lock file of the layer of a digest.
func (p *Provider) layerLockPath(digest string) string {
	return filepath.Join(p.layersDir(), digest+".lock")
}

// completeLayer returns the folder of the complete layer of a digest and records that it is used now, or returns "" if
// there is none.
func (p *Provider) completeLayer(digest string) (string, error) {
	dir := filepath.Join(p.layersDir(), digest)
	if _, err := os.Stat(dir); err != nil { // the folder has this name only when it is complete
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil
		}
		return "", fmt.Errorf("look for layer %s: %w", digest, err)
	}
	now := time.Now()
	if err := os.Chtimes(p.layerLockPath(digest), now, now); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("record the use of layer %s: %w", digest, err)
	}
	return dir, nil
}

// createLayer creates the layer of a digest and returns its folder. If another executor that shares the provider's folder
// creates it first, createLayer returns that executor's layer.
func (p *Provider) createLayer(ctx context.Context, digest string, want sandbox.LayerPackages) (_ string, err error) {
	if err := os.MkdirAll(p.layersDir(), 0o700); err != nil {
		return "", fmt.Errorf("make a layer: %w", err)
	}
	unlock, err := p.lockLayer(ctx, digest)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if dir, err := p.completeLayer(digest); dir != "" || err != nil {
		return dir, err
	}
	if err := p.removeIncompleteLayers(digest); err != nil {
		return "", err
	}
	tmp := filepath.Join(p.layersDir(), digest+".new-"+strings.ToLower(rand.Text()))
	defer func() { err = errors.Join(err, removeAll(tmp)) }()
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return "", fmt.Errorf("make a layer: %w", err)
	}
	if err := p.installPackages(ctx, tmp, want); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, filepath.Join(p.layersDir(), digest)); err != nil {
		return "", fmt.Errorf("make a layer: %w", err)
	}
	return p.completeLayer(digest)
}

// removeIncompleteLayers removes the incomplete layers of a digest that executors left when they crashed. The caller must
// hold the lock of the digest.
func (p *Provider) removeIncompleteLayers(digest string) error {
	left, err := filepath.Glob(filepath.Join(p.layersDir(), digest+".new-*"))
	for _, dir := range left {
		err = errors.Join(err, removeAll(dir))
	}
	return err
}

// lockLayer blocks until this process holds the lock of the layer of a digest. The kernel releases the lock when the
// process ends.
func (p *Provider) lockLayer(ctx context.Context, digest string) (unlock func() error, err error) {
	lock := flock.New(p.layerLockPath(digest))
	locked, err := lock.TryLock() // also if ctx has ended
	if err == nil && !locked {
		_, err = lock.TryLockContext(ctx, lockRetryInterval)
	}
	if err != nil {
		return nil, fmt.Errorf("lock layer %s: %w", digest, err)
	}
	return lock.Unlock, nil
}

// installEnv returns the environment variables of installers: the configuration of npm and pip from this process's
// environment, without API keys.
func (p *Provider) installEnv() []string {
	keep := []string{"HOME=", "LANG=", "TMPDIR=", "USER=", "LOGNAME=", "HTTP_PROXY=", "HTTPS_PROXY=", "NO_PROXY=", "NPM_CONFIG_", "PIP_", "NODE_EXTRA_CA_CERTS=", "SSL_CERT_", "REQUESTS_CA_BUNDLE=", "XDG_"}
	env := []string{"PATH=" + p.cfg.Path}
	for _, kv := range os.Environ() {
		if slices.ContainsFunc(keep, func(k string) bool { return strings.HasPrefix(strings.ToUpper(kv), k) }) {
			env = append(env, kv)
		}
	}
	return env
}

// installerPath returns the path of an installer's program. For python3 it returns the path of the interpreter and not of a
// version manager's shim. If pyenv's shim is killed during an installation, it leaves a lock file in pyenv's folder, and
// each later installation on this machine waits for that lock for a minute and fails.
func (p *Provider) installerPath(ctx context.Context, name string) (string, error) {
	path, err := lookPath(name, "", p.cfg.Path)
	if err != nil {
		return "", layer.InstallError("this machine has no %s on its PATH", name)
	}
	if name != "python3" {
		return path, nil
	}
	cmd := exec.CommandContext(ctx, path, "-c", "import sys; print(sys.executable)") //nolint:gosec // found by its own name
	cmd.Env = p.installEnv()
	out, err := cmd.Output()
	switch {
	case context.Cause(ctx) == errInstallTimeout: //nolint:errorlint // the cause is never wrapped
		return "", p.cfg.Layers.TimeoutError("")
	case ctx.Err() != nil:
		return "", ctx.Err()
	case err != nil:
		return "", layer.InstallError("python3 does not report the path of its interpreter: %v", err)
	}
	if path = strings.TrimSpace(string(out)); !filepath.IsAbs(path) {
		return "", layer.InstallError("python3 does not report the path of its interpreter: sys.executable is %q", path)
	}
	return path, nil
}

// installPackages runs the installers of the wanted packages in the folder of a layer, and checks the folder's size.
func (p *Provider) installPackages(ctx context.Context, dir string, want sandbox.LayerPackages) error {
	cfg := p.cfg.Layers
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Within, errInstallTimeout)
	defer cancel()
	for _, i := range cfg.Installers(want.PackageSet, dir) {
		path, err := p.installerPath(ctx, i.Args[0])
		if err != nil {
			return err
		}
		var said layer.Tail
		cmd := exec.Command(path, i.Args[1:]...) //nolint:gosec // running it is the purpose
		cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = dir, p.installEnv(), &said, &said, outputDrainTimeout
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		err = p.runInstaller(ctx, cmd, dir)
		var exit *exec.ExitError
		var typed *sandbox.Error
		switch {
		case context.Cause(ctx) == errInstallTimeout: //nolint:errorlint // the cause is never wrapped
			return cfg.TimeoutError(said.String())
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &typed):
			return err
		case errors.As(err, &exit):
			return layer.InstallError("%s: %s; it last said: %s", i.Name, exit.ProcessState, layer.LastLines(said.String()))
		case err != nil:
			return layer.InstallError("%s: %v", i.Name, err)
		}
	}
	if size, err := folderSize(dir); err != nil {
		return fmt.Errorf("measure the layer: %w", err)
	} else if size > cfg.MaxBytes {
		return cfg.TooLargeError()
	}
	return nil
}

// runInstaller runs the command of an installer until it ends. It kills the command's process group if ctx ends or the
// folder becomes too large.
func (p *Provider) runInstaller(ctx context.Context, cmd *exec.Cmd, dir string) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	group := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // an error means that no process is left
	defer group()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tick := time.NewTicker(diskMeasureInterval)
	defer tick.Stop()
	for {
		var err error
		select {
		case err := <-ended:
			if errors.Is(err, exec.ErrWaitDelay) {
				err = nil // a background process kept the output open
			}
			return err
		case <-ctx.Done():
			err = ctx.Err()
		case <-tick.C:
			if size, serr := folderSize(dir); serr == nil && size > p.cfg.Layers.MaxBytes { // files may be removed meanwhile
				err = p.cfg.Layers.TooLargeError()
			}
		}
		if err != nil {
			group()
			<-ended
			return err
		}
	}
}

// folderSize returns the total size of the files in a folder, in bytes.
func folderSize(dir string) (size int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			size += info.Size()
		}
		return err
	})
	return size, err
}

// RemoveOrphans removes the dependency layers that were not used for Config.Layers.Keep, and the leftovers of interrupted
// installations. It removes no workspaces: ListWorkspaces and RemoveWorkspace serve that purpose.
func (p *Provider) RemoveOrphans(ctx context.Context, _ time.Duration) (int, error) {
	entries, err := os.ReadDir(p.layersDir())
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("list layers: %w", err)
	}
	for _, e := range entries {
		digest, isLock := strings.CutSuffix(e.Name(), ".lock")
		if !isLock || !events.IsDigest(digest) {
			continue
		}
		if err := p.removeLayerIfOld(ctx, digest, entries); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// removeLayerIfOld removes the layer of a digest if it was not used for Config.Layers.Keep and no executor is creating it.
// entries are the files in the folder of layers.
func (p *Provider) removeLayerIfOld(ctx context.Context, digest string, entries []os.DirEntry) error {
	info, err := os.Stat(p.layerLockPath(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || time.Since(info.ModTime()) < p.cfg.Layers.Keep {
		return err
	}
	used, err := p.usesLayer(ctx, filepath.Join(p.layersDir(), digest))
	if err != nil || used {
		return err
	}
	now, cancel := context.WithCancel(ctx)
	cancel() // one attempt
	unlock, err := p.lockLayer(now, digest)
	if errors.Is(err, context.Canceled) && ctx.Err() == nil {
		return nil
	}
	if err != nil {
		return err
	}
	p.cfg.Logger.Info("sweep: removed an unused layer", "layer", digest, "lastUse", info.ModTime())
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), digest) && e.IsDir() {
			err = errors.Join(err, removeAll(filepath.Join(p.layersDir(), e.Name())))
		}
	}
	return errors.Join(err, os.Remove(p.layerLockPath(digest)), unlock())
}

// usesLayer reports whether a sandbox of this provider uses the layer in a folder.
func (p *Provider) usesLayer(ctx context.Context, dir string) (bool, error) {
	list, err := p.List(ctx)
	if err != nil {
		return false, err
	}
	for _, info := range list {
		rec, err := p.readRecord(info.ID)
		if err == nil && rec.Layer == dir {
			return true, nil
		}
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return false, err
		}
	}
	return false, nil
}
