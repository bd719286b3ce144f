package operations

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func composeFile(t *testing.T) []byte {
	t.Helper()
	raw, err := os.ReadFile("../../../../deploy/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestCompose_IsUpToDate tests that the generated lines of deploy/compose.yaml match the settings.
func TestCompose_IsUpToDate(t *testing.T) {
	t.Parallel()
	have := composeFile(t)
	want, err := GenerateCompose(have)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != string(have) {
		t.Error("deploy/compose.yaml is out of date: run make generate")
	}
}

// TestCompose_PassesEachSetting tests that each setting of a service is passed on by its own name, or is fixed for a
// reason.
func TestCompose_PassesEachSetting(t *testing.T) {
	t.Parallel()
	env, err := serviceEnvironments(composeFile(t))
	if err != nil {
		t.Fatal(err)
	}
	shared := map[string][]Setting{}
	for _, p := range documentedPrograms()[:2] { // settings of every service, and of services that open the log
		if shared[p.Name], err = parseSettings(p.cli); err != nil {
			t.Fatal(err)
		}
	}
	used := map[FixedSetting]bool{}
	for _, p := range documentedPrograms()[2:] {
		own, err := parseSettings(p.cli)
		if err != nil {
			t.Fatal(err)
		}
		if env[p.Name] == nil {
			t.Errorf("compose.yaml has no service %s with an environment", p.Name)
		}
		check := func(program string, list []Setting) {
			for _, s := range list {
				value, has := env[p.Name][s.Variable]
				passed := strings.HasPrefix(value, "${"+s.Variable+":")
				fixed := isFixedSetting(program, s.Variable)
				switch {
				case !passed && !fixed:
					t.Errorf("%s: %s does not reach its container (%q); give the service's environment a block of generated settings", p.Name, s.Variable, value)
				case passed && fixed:
					t.Errorf("%s: %s is passed on, and fixed as well", p.Name, s.Variable)
				case has && passed && strings.HasSuffix(value, ":-}") && s.Default != "":
					t.Errorf("%s: %s has the default %q, and would be set and empty", p.Name, s.Variable, s.Default)
				}
				for _, f := range fixedSettings() {
					if f.Program == program && f.Variable == s.Variable {
						used[f] = true
					}
				}
			}
		}
		check(p.Name, own)
		if p.Name != "egress" && p.Name != "mockllm" { // they do not talk to NATS
			check(everyServiceSection, shared[everyServiceSection])
			if p.Name != "gateway" {
				check(logServicesSection, shared[logServicesSection])
			}
		}
	}
	for _, f := range fixedSettings() {
		if !used[f] || len(f.Instead) < 4 {
			t.Errorf("%+v is of no setting, or says nothing", f)
		}
	}
}

// TestCompose_OmitsSettingsThatAreSetByHand tests that settings that the environment sets, and fixed settings, are not
// generated.
func TestCompose_OmitsSettingsThatAreSetByHand(t *testing.T) {
	t.Parallel()
	const source = `x-all: &all
  SPOOL_LOG_LEVEL: ${SPOOL_LOG_LEVEL:-info}
services:
  session:
    environment:
      <<: *all
      SPOOL_TURN_LIMIT: 2h
      # Generated from the settings of session by ` + "`make generate`" + `; do not edit.
      STALE: x
      # End of the generated settings.
      GOMEMLIMIT: 1GiB
`
	got, err := GenerateCompose([]byte(source))
	if err != nil {
		t.Fatal(err)
	}
	text := string(got)
	lines := strings.Split(text, "\n")
	for line, want := range map[string]bool{
		"      SPOOL_SYNC_INTERVAL: ${SPOOL_SYNC_INTERVAL:-30s}": true, "      SPOOL_TURN_LIMIT: ${SPOOL_TURN_LIMIT:-1h}": false, "      STALE: x": false, "      GOMEMLIMIT: 1GiB": true,
	} {
		if slices.Contains(lines, line) != want {
			t.Errorf("%q is there: %t\n%s", line, !want, text)
		}
	}
	if strings.Contains(text, "SPOOL_SANDBOX_PROVIDERS") {
		t.Error("what is fixed is passed on")
	}
	if again, err := GenerateCompose(got); err != nil || string(again) != text {
		t.Errorf("made again it differs: %v\n%s", err, again)
	}
	if _, err := GenerateCompose([]byte(strings.Replace(source, "# End of", "# Not the end of", 1))); err == nil {
		t.Error("a block without an end is taken")
	}
}

// defaults returns the defaults of the settings of all services and commands, by variable and default.
func defaults(t *testing.T) map[string]map[string]bool {
	t.Helper()
	commands, err := spoolCommands()
	if err != nil {
		t.Fatal(err)
	}
	var list []Setting
	for _, c := range commands {
		list = append(list, c.Settings...)
	}
	for _, p := range documentedPrograms() {
		own, err := parseSettings(p.cli)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, own...)
	}
	out := map[string]map[string]bool{}
	for _, s := range list {
		if out[s.Variable] == nil {
			out[s.Variable] = map[string]bool{}
		}
		out[s.Variable][s.Default] = true
	}
	return out
}

// The lines of compose.yaml that are not generated, and the table of deploy/README.md, state the defaults of the
// settings, except where the installation needs another one.
func TestHandWrittenDefaults_AreThoseOfTheSettings(t *testing.T) {
	t.Parallel()
	other := []string{
		"SPOOL_EGRESS_DRAIN",   // less than stop_grace_period
		"SPOOL_STOP_SANDBOXES", // their volumes go with the containers
	}
	known := defaults(t)
	readme, err := os.ReadFile("../../../../deploy/README.md")
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for name, found := range map[string][][]string{
		"compose.yaml": regexp.MustCompile(`(?m): \$\{([A-Z_]+):-([^}$]*)\}`).FindAllStringSubmatch(string(removeGeneratedLines(composeFile(t))), -1),
		"README.md":    regexp.MustCompile(`(?m)^\| (SPOOL_[A-Z_]+) \| ([a-z0-9-]+) \|`).FindAllStringSubmatch(string(readme), -1),
	} {
		for _, m := range found {
			if known[m[1]] == nil || m[2] == "required" || slices.Contains(other, m[1]) {
				continue
			}
			compared++
			if !known[m[1]][m[2]] {
				t.Errorf("%s: the default of %s is %q, of the setting %v", name, m[1], m[2], known[m[1]])
			}
		}
	}
	if compared == 0 {
		t.Error("no default was found")
	}
}
