package compose

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// modalFiles are the compose files of an installation whose sandboxes run at Modal.
var modalFiles = []string{"deploy/compose.yaml", "deploy/compose.modal.yaml"}

// modalEnv holds the settings that such an installation requires.
var modalEnv = []string{"SPOOL_EGRESS_SERVER=proxy.example.com:8443", "SPOOL_EGRESS_PORT=8443", "SPOOL_MODAL_TOKEN_ID=ak-1", "SPOOL_MODAL_TOKEN_SECRET=as-1", "SPOOL_MODAL_IMAGE=registry.example.com/sandbox:1"}

func parseFile(t *testing.T, out string) (f file) {
	t.Helper()
	if err := json.Unmarshal([]byte(out), &f); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestModalFile_GrantsOnlyWhatIsNeeded tests that executors do not have the engine's socket, that only they have
// Modal's token, and that the egress proxy publishes only its TLS port.
func TestModalFile_GrantsOnlyWhatIsNeeded(t *testing.T) {
	t.Parallel()
	out, err := configOf(t, modalFiles, "deploy/.env.example", modalEnv...)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f := parseFile(t, out)
	var tokens, keys []string
	for name, s := range f.Services {
		for _, v := range s.Volumes {
			if strings.Contains(v.Source+v.Target, "docker.sock") {
				t.Errorf("%s has the engine's socket", name)
			}
			if v.Source == "certificates-egress" {
				keys = append(keys, name)
			}
		}
		for _, value := range s.Environment {
			if value != nil && *value == "as-1" {
				tokens = append(tokens, name)
			}
		}
	}
	slices.Sort(keys)
	if !slices.Equal(tokens, []string{"executor"}) || !slices.Equal(keys, []string{"certificates", "egress"}) {
		t.Errorf("the token is in %v, the key of the proxy's certificate in %v", tokens, keys)
	}
	executor, egress := f.Services["executor"], f.Services["egress"]
	var mounted []string
	for _, v := range executor.Volumes {
		mounted = append(mounted, v.Target)
	}
	slices.Sort(mounted)
	if want := []string{"/run/spool/admin", "/var/lib/spool/certificates/public", "/var/lib/spool/secrets/private"}; !slices.Equal(mounted, want) || len(executor.GroupAdd) > 0 {
		t.Errorf("executors mount %v in groups %v, want %v in none", mounted, executor.GroupAdd, want)
	}
	if _, ok := executor.Networks["modal"]; !ok || f.Networks["modal"].Internal {
		t.Errorf("executors do not reach Modal: %v", executor.Networks)
	}
	if p := egress.Ports; len(p) != 1 || p[0].Target != 7443 || p[0].Published != "8443" {
		t.Errorf("the proxy publishes %+v", p)
	}
	if egress.DependsOn["certificates"].Condition != "service_completed_successfully" {
		t.Error("the proxy may start without its certificate")
	}
	for service, want := range map[string]map[string]string{
		"session": {"SPOOL_SANDBOX_PROVIDERS": "modal"},
		"executor": {"SPOOL_SANDBOX": "modal", "SPOOL_EGRESS_SOCKETS": "", "SPOOL_EGRESS_ADMIN": "/run/spool/admin/egress.sock",
			"SPOOL_EGRESS_SERVER": "proxy.example.com:8443", "SPOOL_EGRESS_AUTHORITY": "/var/lib/spool/certificates/public/ca.pem"},
		"egress": {"SPOOL_EGRESS_LISTEN_TLS": "0.0.0.0:7443", "SPOOL_EGRESS_TLS_CERTIFICATE": "/var/lib/spool/certificates/egress/certificate.pem", "SPOOL_EGRESS_TLS_KEY": "/var/lib/spool/certificates/egress/key.pem"},
	} {
		for name, value := range want {
			if got := f.Services[service].Environment[name]; got == nil || *got != value {
				t.Errorf("%s: %s is %v, want %q", service, name, got, value)
			}
		}
	}
	// Both files contain the command of the service certificates.
	base, err := config(t, "deploy/.env.example")
	if err != nil {
		t.Fatalf("%v: %s", err, base)
	}
	want := append(parseFile(t, base).Services["certificates"].Command, "--issue=/var/lib/spool/certificates/egress=proxy.example.com:8443")
	if got := f.Services["certificates"].Command; !slices.Equal(got, want) {
		t.Errorf("certificates runs %q\nwant %q", got, want)
	}
}

// TestModalFile_VariablesAreDocumented tests that deploy/README.md lists the variables of the file, and that a
// missing required variable is reported.
func TestModalFile_VariablesAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(root + "/deploy/compose.modal.yaml")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(root + "/deploy/README.md")
	if err != nil {
		t.Fatal(err)
	}
	variables := regexp.MustCompile(`\$\{(\w+)(:\?)?`).FindAllStringSubmatch(string(text), -1)
	if len(variables) < 6 {
		t.Fatalf("only %v was read", variables)
	}
	needed := map[string]bool{}
	for _, v := range variables {
		needed[v[1]] = needed[v[1]] || v[2] != ""
		if !regexp.MustCompile(`(?m)^\| [^|]*\b` + v[1] + `\b`).Match(readme) {
			t.Errorf("deploy/README.md has no row of %s", v[1])
		}
	}
	for name, must := range needed {
		if !must {
			continue
		}
		env := slices.DeleteFunc(slices.Clone(modalEnv), func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
		if out, err := configOf(t, modalFiles, "deploy/.env.example", env...); err == nil || !strings.Contains(out, name) {
			t.Errorf("without %s: %v, %.200s", name, err, out)
		}
	}
}
