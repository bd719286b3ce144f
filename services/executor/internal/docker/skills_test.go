package docker

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// zipped is a skill with a script, and its digest.
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

// A skill that several executors bring at once comes once; every sandbox of the
// engine sees it, those that ran before too, and nobody can change it or find others.
func TestShelve(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	p := provide(t, cfg)
	before := create(t, p, newSpec(t))
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
				if dir, err := other.Shelve(t.Context(), digest, open); err != nil || dir != want {
					t.Errorf("shelved in %q, %v", dir, err)
				}
			})
		}
	}
	all.Wait()
	if n := fetched.Load(); n != 1 {
		t.Errorf("it was fetched %d times", n)
	}
	after := create(t, p, newSpec(t))
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
	if dir, err := p.Shelve(t.Context(), digest, nil); err != nil || dir != want {
		t.Errorf("again: %q, %v", dir, err)
	}
}

// A skill that cannot be fetched, or is not one, is an error each time, and leaves nothing that looks like one.
func TestShelveFails(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	path, digest := zipped(t, t.Name())
	gone := errors.New("gone")
	if _, err := p.Shelve(t.Context(), digest, func(context.Context) (*os.File, error) { return nil, gone }); !errors.Is(err, gone) {
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
	if _, err := p.Shelve(t.Context(), digest, func(context.Context) (*os.File, error) { return os.Open(cut) }); err == nil {
		t.Error("half a ZIP is a skill")
	}
	dir, err := p.Shelve(t.Context(), digest, func(context.Context) (*os.File, error) { return os.Open(path) })
	if err != nil {
		t.Fatal(err)
	}
	if out, errs, code := sh(t, create(t, p, newSpec(t)), dir+"/scripts/greet.sh"); out != t.Name() || code != 0 {
		t.Errorf("it says %q, %q, %d", out, errs, code)
	}
}
