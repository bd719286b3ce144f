package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/runner"
)

func trusts(text string) (certificate string, change func(*runner.Query)) {
	certificate = "-----BEGIN CERTIFICATE-----\n" + text + "\n-----END CERTIFICATE-----\n"
	return certificate, func(q *runner.Query) { q.Authority = certificate }
}

// A process trusts the authority that its query names, and takes the next query only if that names the same.
func TestAuthorities_OthersNeedAnotherProcess(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.attach(1, 0)
	one, first := trusts("b25l")
	two, second := trusts("dHdv")
	const look = `shell echo "$SSL_CERT_FILE" >at; [ "$SSL_CERT_FILE" = "$NODE_EXTRA_CA_CERTS" ] && [ -n "$SSL_CERT_FILE" ] && cp "$SSL_CERT_FILE" seen; true`
	seen := func() string {
		t.Helper()
		raw, err := os.ReadFile(filepath.Join(s.workspace, "seen"))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	if l := c.run("exe_1", look, first); decode[runner.TurnStart](t, l[0]).Warm || !strings.HasSuffix(seen(), one) {
		t.Errorf("the first process: %s", seen())
	}
	if l := c.run("exe_2", look, first); !decode[runner.TurnStart](t, l[0]).Warm || !strings.HasSuffix(seen(), one) {
		t.Error("the same authority is another process's")
	}
	if l := c.run("exe_3", look, second); decode[runner.TurnStart](t, l[0]).Warm || !strings.HasSuffix(seen(), two) || strings.Contains(seen(), one) {
		t.Error("a process goes on that trusts what is no more")
	}
	at, err := os.ReadFile(filepath.Join(s.workspace, "at"))
	if err != nil {
		t.Fatal(err)
	}
	bundle := strings.TrimSpace(string(at))
	if l := c.run("exe_4", look); decode[runner.TurnStart](t, l[0]).Warm {
		t.Error("a process goes on that trusts what it is not to")
	}
	if at, err := os.ReadFile(filepath.Join(s.workspace, "at")); err != nil || strings.TrimSpace(string(at)) == bundle {
		t.Errorf("without an authority SSL_CERT_FILE is %s, %v", at, err)
	}
	if _, err := os.Stat(bundle); !os.IsNotExist(err) {
		t.Errorf("the file is there still: %v", err)
	}
	if r := c.start("exe_5", "say x", func(q *runner.Query) { q.Authority = "nonsense" }); r.Error == nil || r.Error.Code != "INVALID_COMMAND" || !strings.Contains(r.Error.Message, "query.authority") {
		t.Errorf("nonsense is answered by %+v", r)
	}
}
