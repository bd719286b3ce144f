package docker

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

const (
	// runnerCopyTimeout is the time limit for copying the runner into its volume, including the time until other executors that do the same
	// have finished.
	runnerCopyTimeout = 3 * time.Minute
	// volumeLockTimeout is the time limit for the work of an executor that holds the lock on a volume. It is shorter than abandonedAge, so
	// that the holder of an older lock must have died.
	volumeLockTimeout = time.Minute
	// abandonedAge is the age from which a lock on a volume counts as abandoned by an executor that has died.
	abandonedAge = 90 * time.Second
	// enginePollInterval is the interval at which the state of the engine is read during a wait.
	enginePollInterval = 100 * time.Millisecond
	// runnerCompleteFile is the name of the file that is written last into the runner's volume. Its presence means that the volume is
	// complete.
	runnerCompleteFile = "complete"
)

// runnerBinary is the runner program for one processor architecture.
type runnerBinary struct {
	path   string
	size   int64
	digest string // SHA-256, hexadecimal

	mu     sync.Mutex
	filled bool // the volume was found complete
}

// volumeName returns the name of the volume that holds the runner, which contains its digest.
func (r *runnerBinary) volumeName() string { return namePrefix + "runner-" + r.digest[:12] }

// forgetVolume makes the next call of Provider.fillRunnerVolume check again whether the volume of the runner is complete.
func (r *runnerBinary) forgetVolume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.filled = false
}

// imageArchitectures maps the machine in the header of an ELF binary to the name of the processor architecture in images.
var imageArchitectures = map[elf.Machine]string{
	elf.EM_X86_64: "amd64", elf.EM_AARCH64: "arm64", elf.EM_386: "386", elf.EM_ARM: "arm", elf.EM_RISCV: "riscv64",
	elf.EM_PPC64: "ppc64le", elf.EM_S390: "s390x",
}

// runnerForImage returns the runner program for the processor architecture of an image.
func (p *Provider) runnerForImage(pic imageInfo) (*runnerBinary, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.runners[pic.architecture]; r != nil {
		return r, nil
	}
	info, err := os.Stat(p.cfg.Runner)
	if err != nil {
		return nil, fmt.Errorf("the runner's binary: %w", err)
	}
	path := p.cfg.Runner
	if info.IsDir() {
		path = filepath.Join(path, "runner-linux-"+pic.architecture)
	}
	unsupported := func(has string) error {
		return guest.WithCode(sandbox.CodeImageUnsupported, fmt.Sprintf(
			"image %q is for the architecture %s, %s: use an image for another architecture, or install a runner for this one", pic.ref, pic.architecture, has), nil)
	}
	file, err := elf.Open(path)
	if errors.Is(err, os.ErrNotExist) && info.IsDir() {
		return nil, unsupported("for which there is no runner in " + p.cfg.Runner)
	}
	if err != nil {
		return nil, fmt.Errorf("the runner's binary %s is not a program for Linux: %w", path, err)
	}
	machine := imageArchitectures[file.Machine]
	if err := file.Close(); err != nil {
		return nil, fmt.Errorf("the runner's binary: %w", err)
	}
	if machine != pic.architecture {
		return nil, unsupported("the runner at " + path + " for " + machine)
	}
	r := &runnerBinary{path: path}
	if r.size, r.digest, err = copyWithDigest(path, io.Discard); err != nil {
		return nil, fmt.Errorf("the runner's binary: %w", err)
	}
	p.runners[pic.architecture] = r
	return r, nil
}

// copyWithDigest copies the file at path to the writer to, and returns the file's size and its SHA-256 in hexadecimal.
func copyWithDigest(path string, to io.Writer) (int64, string, error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, "", err
	}
	defer file.Close() //nolint:errcheck // only read from
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(sum, to), file)
	return n, hex.EncodeToString(sum.Sum(nil)), err
}

// fillRunnerVolume creates the volume of the runner and copies the runner into it, unless the volume is complete. Only the executor that
// created the helper container with a fixed name, which is the lock, copies the runner.
func (p *Provider) fillRunnerVolume(ctx context.Context, r *runnerBinary, image string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.filled {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, runnerCopyTimeout)
	defer cancel()
	if err := p.createVolume(ctx, r.volumeName(), map[string]string{
		labelVersion: labelsVersion, labelRole: roleRunner, labelRunner: r.digest, labelEngine: p.cfg.Engine,
	}); err != nil {
		return err
	}
	helper, err := p.createLockHelper(ctx, r.volumeName()+"-fill", image, helperVolume{r.volumeName(), "runner"})
	if err != nil {
		return fmt.Errorf("copy the runner to the engine: %w", err)
	}
	defer p.discardHelper(ctx, helper)
	there, err := p.isRunnerVolumeComplete(ctx, helper, r)
	if err == nil && !there {
		err = p.copyRunner(ctx, helper, r)
	}
	if err != nil {
		return err
	}
	r.filled = true
	return nil
}

// createLockHelper creates a helper container with the given name, and returns its id. It blocks while another executor's helper container
// has the name, and removes one that is older than abandonedAge.
func (p *Provider) createLockHelper(ctx context.Context, name, image string, volumes ...helperVolume) (string, error) {
	tick := time.NewTicker(enginePollInterval)
	defer tick.Stop()
	var holder string
	var since time.Time
	for {
		id, err := p.createHelper(ctx, name, image, volumes...)
		if !errdefs.IsConflict(err) {
			return id, err
		}
		other, err := callEngine(ctx, p, "inspect the lock of the volume", func(ctx context.Context) (container.InspectResponse, error) { return p.api.ContainerInspect(ctx, name) })
		switch {
		case errdefs.IsNotFound(err): // removed just now, or not created completely
		case err != nil:
			return "", err
		case other.ID != holder:
			holder, since = other.ID, time.Now()
		case time.Since(since) > p.stale:
			p.cfg.Logger.Warn("removing an abandoned helper", "container", name)
			p.discardHelper(ctx, holder)
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("container %s does not end: %w", name, ctx.Err())
		case <-tick.C:
		}
	}
}

// isRunnerVolumeComplete reports whether the runner's volume contains runnerCompleteFile. It reads the volume through a helper container.
func (p *Provider) isRunnerVolumeComplete(ctx context.Context, helper string, r *runnerBinary) (bool, error) {
	for name, size := range map[string]int64{"runner": r.size, runnerCompleteFile: int64(len(r.digest))} {
		stat, err := callEngine(ctx, p, "look at the runner's volume", func(ctx context.Context) (container.PathStat, error) {
			return p.api.ContainerStatPath(ctx, helper, "/v/runner/"+name)
		})
		if errdefs.IsNotFound(err) || err == nil && stat.Size != size {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// copyRunner copies the runner into its volume through a helper container.
func (p *Provider) copyRunner(ctx context.Context, helper string, r *runnerBinary) error {
	reader, writer := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := r.writeTar(writer)
		_ = writer.CloseWithError(err) // the reader of a pipe gets it; closing one never fails
		written <- err
	}()
	ctx, cancel := context.WithTimeout(ctx, volumeLockTimeout)
	defer cancel()
	err := p.api.CopyToContainer(ctx, helper, "/", reader, container.CopyToContainerOptions{})
	_ = reader.Close() // frees the writer; closing a pipe never fails
	if werr := <-written; werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		return fmt.Errorf("read the runner's binary: %w", werr)
	}
	return p.translateError(ctx, "bring the runner to the engine", err)
}

// writeTar writes a tar archive with the runner, followed by runnerCompleteFile.
func (r *runnerBinary) writeTar(to io.Writer) error {
	out := tar.NewWriter(to)
	if err := out.WriteHeader(&tar.Header{Name: "v/runner/runner", Mode: 0o555, Size: r.size, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, sum, err := copyWithDigest(r.path, out)
	if err != nil {
		return err
	}
	if sum != r.digest {
		return fmt.Errorf("%s has changed: restart the executor", r.path)
	}
	if err := out.WriteHeader(&tar.Header{Name: "v/runner/" + runnerCompleteFile, Mode: 0o444, Size: int64(len(sum)), Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	if _, err := io.WriteString(out, sum); err != nil {
		return err
	}
	return out.Close()
}
