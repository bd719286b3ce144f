package cli_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/cli"
)

// The transcript is written completely or not at all, replaces any existing entry, and no link is followed out of the
// state folder.
func TestProvideTranscript(t *testing.T) {
	t.Parallel()
	const text = "{}\n"
	sum := sha256.Sum256([]byte(text))
	digest := hex.EncodeToString(sum[:])
	for name, c := range map[string]struct {
		before func(state, outside string) error
		digest string
		code   int
		says   string
	}{
		"a new folder":   {nil, digest, 0, ""},
		"another digest": {nil, strings.Repeat("0", 64), 1, "SHA-256 does not match"},
		"a file is there": {func(state, _ string) error {
			return place(state, func(p string) error { return os.WriteFile(p, []byte("old"), 0o600) })
		}, digest, 0, ""},
		"a link is there": {func(state, outside string) error {
			return place(state, func(p string) error { return os.Symlink(filepath.Join(outside, "victim"), p) })
		}, digest, 0, ""},
		"a folder is there": {func(state, _ string) error {
			return place(state, func(p string) error { return os.MkdirAll(p, 0o700) })
		}, digest, 0, ""},
		"the folder leads outside": {func(state, outside string) error { return os.Symlink(outside, filepath.Join(state, "launch")) }, digest, 1, "escapes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			workspace, state, outside := t.TempDir(), t.TempDir(), t.TempDir()
			if c.before != nil {
				if err := c.before(state, outside); err != nil {
					t.Fatal(err)
				}
			}
			var out, says bytes.Buffer
			code := cli.Run(t.Context(), []string{"provide-transcript", "--workspace", workspace, "--state", state, "--sha256", c.digest}, cli.System{
				Stdin: strings.NewReader(text), Stdout: &out, Stderr: &says, Getenv: func(string) string { return "" },
			})
			if code != c.code || !strings.Contains(says.String(), c.says) {
				t.Errorf("exit code %d, %s%s", code, out.Bytes(), says.Bytes())
			}
			raw, err := os.ReadFile(filepath.Join(state, "launch", "transcript"))
			if written := err == nil && string(raw) == text; written != (c.code == 0) {
				t.Errorf("there is %q, %v", raw, err)
			}
			if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
				t.Errorf("outside of the state folder there are %v, %v", left, err)
			}
			if left, err := filepath.Glob(filepath.Join(state, "launch", "*.new")); err != nil || len(left) > 0 {
				t.Errorf("left are %v, %v", left, err)
			}
		})
	}
}

// place makes what an earlier attempt left where the transcript goes.
func place(state string, leave func(string) error) error {
	if err := os.MkdirAll(filepath.Join(state, "launch"), 0o700); err != nil {
		return err
	}
	return leave(filepath.Join(state, "launch", "transcript"))
}
