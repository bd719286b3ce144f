package docker

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	dockerevents "github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// zipped returns the path of a skill with a script, and its digest.
func zipped(t testing.TB, says string) (path, digest string) {
	t.Helper()
	var b bytes.Buffer
	out := zip.NewWriter(&b)
	for _, f := range []struct {
		name, content string
		mode          fs.FileMode
	}{
		{"SKILL.md", "---\nname: greet\ndescription: Greets.\n---\nRun scripts/greet.sh.\n", 0o644},
		{"scripts/greet.sh", "#!/bin/sh\necho " + says + "\n", 0o755},
	} {
		h := &zip.FileHeader{Name: f.name, Method: zip.Deflate}
		h.SetMode(f.mode)
		w, err := out.CreateHeader(h)
		if err == nil {
			_, err = w.Write([]byte(f.content))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b.Bytes())
	path = filepath.Join(t.TempDir(), "skill.zip")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, hex.EncodeToString(sum[:])
}

// ownEngine returns a config for an engine to which no other test, and no earlier run of the test, copies skills.
func ownEngine(t testing.TB) Config {
	cfg := needEngine(t)
	cfg.Engine += "-" + rand.Text()
	return cfg
}

func specOf(t testing.TB, p *Provider) sandbox.Spec {
	spec := newSpec(t)
	spec.Labels.Engine = p.cfg.Engine
	return spec
}

// A skill that several executors copy concurrently is copied once. Every sandbox of the engine sees it, earlier ones
// included, and no sandbox can change it or find others.
func TestShelve(t *testing.T) {
	t.Parallel()
	cfg := ownEngine(t)
	p := provide(t, cfg)
	before := create(t, p, specOf(t, p))
	path, digest := zipped(t, t.Name())
	var fetched atomic.Int32
	open := func(context.Context) (*os.File, error) {
		fetched.Add(1)
		return os.Open(path)
	}
	want := "/bin/skills/" + digest
	var all sync.WaitGroup
	for range 3 {
		other := provide(t, cfg)
		for range 2 {
			all.Go(func() {
				if dir, err := other.StoreSkill(t.Context(), digest, open); err != nil || dir != want {
					t.Errorf("shelved in %q, %v", dir, err)
				}
			})
		}
	}
	all.Wait()
	if n := fetched.Load(); n != 1 {
		t.Errorf("it was fetched %d times", n)
	}
	after := create(t, p, specOf(t, p))
	for name, b := range map[string]*box{"before": before, "after": after} {
		for line, says := range map[string]string{
			want + "/scripts/greet.sh":                      t.Name(),
			"head -n 2 " + want + "/SKILL.md | tail -n 1":   "name: greet",
			"touch " + want + "/x":                          "Read-only file system",
			"echo x > " + want + "/SKILL.md":                "Read-only file system",
			"ls /bin/skills":                                "Permission denied",
			"cat /bin/skills/" + strings.Repeat("0", 64):    "No such file",
			"stat -c '%u %a' " + want + "/scripts/greet.sh": "0 555",
		} {
			out, errs, _ := sh(t, b, line)
			if !strings.Contains(out+errs, says) {
				t.Errorf("%s: %s says %q and %q, want %q", name, line, out, errs, says)
			}
		}
	}
	if dir, err := p.StoreSkill(t.Context(), digest, nil); err != nil || dir != want {
		t.Errorf("again: %q, %v", dir, err)
	}
}

// A skill that cannot be fetched, or is invalid, fails each time, and leaves nothing that looks like a skill.
func TestShelveFails(t *testing.T) {
	t.Parallel()
	p := provide(t, ownEngine(t))
	path, digest := zipped(t, t.Name())
	gone := errors.New("gone")
	if _, err := p.StoreSkill(t.Context(), digest, func(context.Context) (*os.File, error) { return nil, gone }); !errors.Is(err, gone) {
		t.Errorf("without a ZIP: %v", err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	cut := filepath.Join(t.TempDir(), "cut.zip")
	if err := os.WriteFile(cut, raw[:len(raw)-30], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := p.StoreSkill(t.Context(), digest, func(context.Context) (*os.File, error) { return os.Open(cut) }); err == nil {
		t.Error("half a ZIP is a skill")
	}
	dir, err := p.StoreSkill(t.Context(), digest, func(context.Context) (*os.File, error) { return os.Open(path) })
	if err != nil {
		t.Fatal(err)
	}
	if out, errs, code := sh(t, create(t, p, specOf(t, p)), dir+"/scripts/greet.sh"); out != t.Name() || code != 0 {
		t.Errorf("it says %q, %q, %d", out, errs, code)
	}
}

// Skills that are wanted concurrently are copied together. A missing and a broken one fail alone.
func TestShelve_CopiesSkillsTogether(t *testing.T) {
	t.Parallel()
	p := provide(t, ownEngine(t))
	gone := errors.New("gone")
	type asked struct {
		digest, dir string
		open        func() (*os.File, error)
		err         error
	}
	var all []*asked
	for i := range 6 {
		path, digest := zipped(t, fmt.Sprint(t.Name(), i))
		a := &asked{digest: digest, open: func() (*os.File, error) { return os.Open(path) }}
		switch i {
		case 2:
			a.open = func() (*os.File, error) { return nil, gone }
		case 4:
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, raw[:len(raw)-30], 0o600); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, a)
	}
	made := helpers(t, p)
	p.skills.turn <- struct{}{} // so that all of them wait
	var wait sync.WaitGroup
	for _, a := range all {
		wait.Go(func() {
			a.dir, a.err = p.StoreSkill(t.Context(), a.digest, func(context.Context) (*os.File, error) { return a.open() })
		})
	}
	for waiting := 0; waiting < len(all); runtime.Gosched() {
		p.skills.mu.Lock()
		waiting = len(p.skills.wanted)
		p.skills.mu.Unlock()
	}
	<-p.skills.turn
	wait.Wait()
	for i, a := range all {
		switch i {
		case 2:
			if !errors.Is(a.err, gone) || a.dir != "" {
				t.Errorf("one that is gone: %q, %v", a.dir, a.err)
			}
		case 4:
			if a.err == nil || errors.Is(a.err, gone) || a.dir != "" {
				t.Errorf("a broken one: %q, %v", a.dir, a.err)
			}
		default:
			if a.err != nil || a.dir != "/bin/skills/"+a.digest {
				t.Errorf("skill %d: %q, %v", i, a.dir, a.err)
			}
		}
	}
	b := create(t, p, specOf(t, p))
	for _, i := range []int{0, 1, 3, 5} {
		if out, errs, code := sh(t, b, all[i].dir+"/scripts/greet.sh"); out != fmt.Sprint(t.Name(), i) || code != 0 {
			t.Errorf("skill %d says %q, %q, %d", i, out, errs, code)
		}
	}
	if n := made(); n != 1 {
		t.Errorf("%d helpers were made", n)
	}
}

// helpers subscribes to the engine's events, and returns a function that counts the helpers that held the lock of
// skills since then. The engine keeps only some hundred events, so it cannot be asked afterwards.
func helpers(t *testing.T, p *Provider) (count func() int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	made, errs := p.api.Events(ctx, dockerevents.ListOptions{Filters: filters.NewArgs(
		filters.Arg("type", "container"), filters.Arg("container", SkillsVolume(p.cfg.Engine)), filters.Arg("event", "create"),
	)})
	return func() (n int) {
		last, err := p.lockSkillsVolume(ctx) // it comes after all others
		if err != nil {
			t.Fatal(err)
		}
		p.discardHelper(ctx, last)
		for {
			select {
			case m := <-made:
				if m.Actor.ID == last {
					return n
				}
				n++
			case err := <-errs:
				t.Fatal(err)
			}
		}
	}
}
