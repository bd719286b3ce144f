package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestHeadsPublicKey_PrintsThePublicKey tests that the public key is printed for a private key from the variable or a
// file, and that errors do not contain the private key.
func TestHeadsPublicKey_PrintsThePublicKey(t *testing.T) {
	t.Parallel()
	seed := strings.Repeat("5a", 32)
	file := filepath.Join(t.TempDir(), "heads.key")
	if err := os.WriteFile(file, []byte(seed+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	one := spool(t, testIO(t), "heads", "public-key", "--heads-key", seed)
	if two := spool(t, testIO(t), "heads", "public-key", "--heads-key-file", file); one.code != 0 || len(one.out) != 65 || two.out != one.out {
		t.Errorf("got %+v and %+v", one, two)
	}
	for name, args := range map[string][]string{
		"heads-key: set ":         {},
		"heads-key: is not a key": {"--heads-key", seed[1:]},
		"heads-key-file: open ":   {"--heads-key-file", file + "x"},
	} {
		got := spool(t, testIO(t), append([]string{"heads", "public-key"}, args...)...)
		if got.code == 0 || !strings.HasPrefix(got.err, "spool: "+name) || strings.Contains(got.err, seed[1:]) {
			t.Errorf("%q: got %+v", name, got)
		}
	}
}

// TestVerify_RefusesWrongPublicKeys tests that an invalid key file is an error that names the option and the file,
// before the log is read.
func TestVerify_RefusesWrongPublicKeys(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, c := range map[string]struct{ content, want string }{
		"empty":       {"\n", "holds no key"},
		"not a key":   {"ssh-ed25519 AAAA\n", "is not a key"},
		"a short key": {strings.Repeat("a", 63), "is not a key"},
	} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		w := testIO(t)
		w.Local = &fakeLocal{dir: "/d", open: func() (Installation, error) {
			return Installation{Log: logged(t), Close: func() error { return nil }}, nil
		}}
		if got := spool(t, w, "verify", "--public-key", file); got.code != ExitFailed || !strings.Contains(got.err, "public-key: ") || !strings.Contains(got.err, c.want) {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}
