//go:build bench

package modal

import (
	"context"
	"io"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/docker"
	"github.com/spoolhq/spool/services/executor/internal/layer"
)

// TestOverhead measures what an exec and a line of its output cost on Modal's stand-in, beside Docker, in one run:
//
//	cd services/executor && go test -tags bench -run TestOverhead -v -count=1 ./internal/modal
func TestOverhead(t *testing.T) {
	s := ownServer(t)
	cfg := s.config(t)
	onModal := create(t, provide(t, cfg), newSpec(t, cfg))
	limits := cfg.Limits
	limits.PIDs = 512
	d, err := docker.New(docker.Config{Engine: cfg.Engine, Runner: cfg.Runner, Image: testImage, Limits: limits, DiskLimit: docker.DiskLimitWatch,
		TmpBytes: 512 << 20, Users: docker.UserRange{First: 70000, Last: 99999}, Files: 1_000_000, Layers: layer.Config{Within: time.Minute, MaxBytes: 1 << 30, Keep: time.Hour}})
	if err != nil {
		t.Fatal(err)
	}
	spec := newSpec(t, cfg)
	t.Cleanup(func() {
		if err := d.Terminate(context.Background(), spec.ID, true); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	onDocker, err := d.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	const lines = 20_000
	execs := func(box sandbox.Sandbox) time.Duration { return took(t, box, 30, "true") }
	line := func(box sandbox.Sandbox) time.Duration {
		return max(0, took(t, box, 3, "seq -w "+strconv.Itoa(lines))-took(t, box, 3, "true")) / lines
	}
	t.Logf("an exec: Docker %s, Modal's stand-in %s", execs(onDocker), execs(onModal))
	t.Logf("a line of output: Docker %s, Modal's stand-in %s", line(onDocker), line(onModal))
}

// took returns the median time of a shell line, from its start to its exit code.
func took(t *testing.T, box sandbox.Sandbox, times int, line string) time.Duration {
	t.Helper()
	var all []time.Duration
	for range times {
		began := time.Now()
		proc, err := box.Exec(t.Context(), sandbox.Command{Args: []string{"sh", "-c", line}})
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, proc.Stderr()) }()
		if err := proc.Stdin().Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, proc.Stdout()); err != nil {
			t.Fatal(err)
		}
		if _, err := proc.Wait(); err != nil {
			t.Fatal(err)
		}
		all = append(all, time.Since(began))
	}
	slices.Sort(all)
	return all[len(all)/2]
}
