package compose

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"time"
)

// finding is a line of `spool doctor --json`.
type finding struct{ Check, Status, Detail, Remedy string }

// runDoctor checks that the installation passes `spool doctor`, and that doctor finds a published port of NATS.
func (p *project) runDoctor(url string) {
	p.t.Helper()
	program := filepath.Join(p.t.TempDir(), "spool")
	p.runIn(filepath.Join(root, "cmd"), 10*time.Minute, "go", "build", "-o", program, "./spool")
	examine := func(name string) map[string]finding {
		out, err := p.tryIn(p.dir, time.Minute, program, "doctor", "--security", "--json", "--data", p.t.TempDir(), "--url", url, "--project", name, "--env-file", filepath.Join(p.dir, "deploy", ".env"))
		found := map[string]finding{}
		for line := range strings.Lines(out) {
			var f finding
			if strings.HasPrefix(line, "{") {
				if err := json.Unmarshal([]byte(line), &f); err != nil {
					p.t.Fatal(err)
				}
				found[f.Check] = f
			}
		}
		if len(found) < 10 {
			p.t.Fatalf("%v: %s", err, out)
		}
		return found
	}
	for name, f := range examine(p.name) {
		if f.Status == "failed" {
			p.t.Errorf("%s: %+v", name, f)
		}
	}

	other := p.name + "-other"
	p.run(time.Minute, "docker", "run", "-d", "--name", other, "--label", "com.docker.compose.project="+other, "--label", "com.docker.compose.service=nats",
		"-p", "0.0.0.0::4222", "-v", "/var/run/docker.sock:/var/run/docker.sock", "--entrypoint", "sleep", "nats:2.15.2-alpine", "600")
	defer p.run(time.Minute, "docker", "rm", "--force", other)
	found := examine(other)
	for _, check := range []string{"published ports", "services confined", "engine's socket"} {
		if found[check].Status != "failed" {
			p.t.Errorf("%s with a published port: %+v", check, found[check])
		}
	}
}
