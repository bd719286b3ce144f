package trust_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/trust"
)

const certificate = "-----BEGIN CERTIFICATE-----\nb3Vycw==\n-----END CERTIFICATE-----\n"

func TestLaunch_AddsTheAuthority(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	corporate, inherited := filepath.Join(dir, "corporate.pem"), filepath.Join(dir, "inherited.pem")
	for path, text := range map[string]string{corporate: "of the company", inherited: "of the image\n\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	before := map[string]string{"A": "1", "NODE_EXTRA_CA_CERTS": corporate, "CURL_CA_BUNDLE": filepath.Join(dir, "none.pem"), "PIP_CERT": "relative.pem"}
	l, file, err := trust.AddAuthority(agent.Launch{
		Folders: agent.Folders{State: dir}, Env: before, Environ: []string{"GIT_SSL_CAINFO=" + inherited, "NODE_EXTRA_CA_CERTS=" + filepath.Join(dir, "other.pem"), "B=2"},
	}, certificate)
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(dir, "launch", "authorities.pem")
	if filepath.Join(dir, filepath.FromSlash(file.Path)) != at || !strings.HasPrefix(file.Path, agent.UnsavedFolder+"/") {
		t.Errorf("it is laid down at %s", file.Path)
	}
	if !strings.HasSuffix(file.Content, "of the company\nof the image\n"+certificate) {
		t.Errorf("it ends with %q", file.Content[max(0, len(file.Content)-200):])
	}
	if system, err := os.ReadFile("/etc/ssl/certs/ca-certificates.crt"); err == nil && !strings.HasPrefix(file.Content, string(system)) {
		t.Error("the system's authorities are not in it")
	}
	env := l.Environment(nil)
	for _, name := range []string{"SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT"} {
		if !slices.Contains(env, name+"="+at) {
			t.Errorf("%s is not set: %v", name, env)
		}
	}
	if !slices.Contains(env, "A=1") || !slices.Contains(env, "B=2") || before["PIP_CERT"] != "relative.pem" {
		t.Errorf("what else there was: %v, %v", env, before)
	}
	// The next turn has the same text; otherwise the process would be replaced each time.
	l.Env = before
	_, again, err := trust.AddAuthority(l, certificate)
	if err != nil || again != file {
		t.Errorf("another time it is another file, %v", err)
	}
}

func TestLaunch_TakesSeveralCertificates(t *testing.T) {
	t.Parallel()
	bundle := certificate + "\n" + certificate
	_, file, err := trust.AddAuthority(agent.Launch{Folders: agent.Folders{State: t.TempDir()}}, bundle)
	if err != nil || !strings.HasSuffix(file.Content, bundle) {
		t.Errorf("%v; it ends with %q", err, file.Content[max(0, len(file.Content)-200):])
	}
}

func TestLaunch_RefusesTextThatIsNotPEM(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const key = "-----BEGIN PRIVATE KEY-----\nb3Vycw==\n-----END PRIVATE KEY-----\n"
	for name, c := range map[string]struct{ authority, want string }{
		"text": {"x", "part 1"}, "a key": {key, "part 1"}, "nothing": {" \n", "no certificate"}, "text before": {"x\n" + certificate, "part 1"},
		"text behind": {certificate + certificate + "x", "part 3"}, "text between": {certificate + "x\n" + certificate, "part 2"}, "a key behind": {certificate + key, "part 2"},
		"half a certificate": {certificate + certificate[:40], "part 2"}, "a broken one first": {certificate[:40] + "\n" + certificate, "part 1"},
	} {
		if _, _, err := trust.AddAuthority(agent.Launch{Folders: agent.Folders{State: dir}}, c.authority); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	large := filepath.Join(dir, "large.pem")
	if err := os.WriteFile(large, make([]byte, 4<<20+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := trust.AddAuthority(agent.Launch{Folders: agent.Folders{State: dir}, Env: map[string]string{"PIP_CERT": large}}, certificate); err == nil || !strings.Contains(err.Error(), large) {
		t.Errorf("a file of any size: %v", err)
	}
	if _, _, err := trust.AddAuthority(agent.Launch{Folders: agent.Folders{State: dir}, Env: map[string]string{"PIP_CERT": dir}}, certificate); err != nil {
		t.Errorf("a folder, which is no file of authorities: %v", err)
	}
}
