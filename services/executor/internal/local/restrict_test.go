package local

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/landlock"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// TestExec_OpensNoFileOfSpoolOrOfOtherSandboxes tests which files processes of a sandbox open with hidden folders, and
// that they open all of them without, as on a kernel without Landlock.
func TestExec_OpensNoFileOfSpoolOrOfOtherSandboxes(t *testing.T) {
	t.Parallel()
	for name, hide := range map[string]bool{"with Landlock": true, "without Landlock": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if hide && !landlock.Supported() {
				t.Skip("this kernel has no Landlock; the case without Landlock tests this kernel")
			}
			cfg := newConfig(t)
			cfg.Hidden = nil
			if hide {
				cfg.Hidden = []string{cfg.Dir}
			}
			if err := os.WriteFile(filepath.Join(cfg.Dir, "local.key"), []byte("key"), 0o600); err != nil {
				t.Fatal(err)
			}
			p := newProvider(t, cfg)
			shared := filepath.Join(p.skillsDir(), "digest")
			if err := os.MkdirAll(shared, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(shared, "SKILL.md"), []byte("a skill"), 0o600); err != nil {
				t.Fatal(err)
			}
			b, other := create(t, p, newSpec(t)), create(t, p, newSpec(t))
			if err := os.WriteFile(filepath.Join(other.workspaceDir(), "file"), []byte("of another session"), 0o600); err != nil {
				t.Fatal(err)
			}
			for path, always := range map[string]bool{
				filepath.Join(cfg.Dir, "local.key"):                          false,
				filepath.Join(b.dir, sandboxRecordFile):                      false,
				filepath.Join(other.dir, sandboxRecordFile):                  false,
				filepath.Join(other.workspaceDir(), "file"):                  false,
				filepath.Join(p.stateDir(b.rec.Labels.Session), stateRecord): false,
				filepath.Join(shared, "SKILL.md"):                            true,
				"own":                                                        true, "/etc/passwd": true, "/proc/self/environ": true,
			} {
				out, ok := runInSandbox(t, b, "echo own > own && cp own $HOME/own && mv $HOME/own $TMPDIR/own && cat "+path)
				if want := always || !hide; ok != want {
					t.Errorf("%s: opened is %t, want %t: %s", path, ok, want, out)
				}
			}
			if out, ok := runInSandbox(t, b, "echo changed > "+filepath.Join(shared, "SKILL.md")); ok == hide {
				t.Errorf("a skill of all sandboxes was changed: %t, want %t: %s", ok, !hide, out)
			}
		})
	}
}

// runInSandbox runs a program of sh in a sandbox, and returns its output and whether it succeeded.
func runInSandbox(t *testing.T, b *box, program string) (out string, ok bool) {
	t.Helper()
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"sh", "-c", "exec 2>&1; " + program}})
	if err != nil {
		t.Fatal(err)
	}
	if err := proc.Stdin().Close(); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	if _, err := io.Copy(&said, proc.Stdout()); err != nil {
		t.Fatal(err)
	}
	code, err := proc.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return said.String(), code == 0
}
