// Package operations makes docs/operations.md: every setting, from the structs
// that the programs read, every metric, from what they register, and how to run it all.
// It also makes the lines of deploy/compose.yaml that pass the settings on.
package operations

import (
	"bytes"
	_ "embed"
	"fmt"
	"text/template"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/spool/internal/command"
	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/services/session/janitor"
	"github.com/spoolhq/spool/services/skills"
)

//go:generate go run ./gen ../../../../docs/operations.md ../../../../deploy/compose.yaml

//go:embed operations.md.tmpl
var text string

// program is what one section of the document is about.
type program struct {
	Name, Doc string
	cli       any // what kong reads
	metrics   func(prometheus.Registerer)
}

// programs are those whose settings and metrics are told, in this order.
func programs() []program {
	return []program{
		{"every service", "Session, projector, janitor, skills, gateway and executor all take these.", &daemon.Settings{},
			func(r prometheus.Registerer) { daemon.WatchConnection(r, nil) }},
		{logServices, "Session, projector, janitor, skills and executor take this as well ([security.md](security.md)).", &daemon.LogSettings{}, nil},
		{"session", "Owns the life of sessions.", &sessionSettings{}, session.DescribeMetrics},
		{"projector", "Folds the log into Postgres.", &projector.Config{}, projector.DescribeMetrics},
		{"janitor", "Removes the content of deleted sessions, and what no session needs, for good ([security.md](security.md)).", &janitor.Config{}, janitor.DescribeMetrics},
		{"skills", "Checks and keeps skills.", &skills.Config{}, skills.DescribeMetrics},
		{"gateway", "What clients talk to. Its own listener answers /healthz and /readyz as well, and /metrics to the root key, or without API keys to everybody.", &gatewaySettings{}, gateway.DescribeMetrics},
		{"executor", "Runs agents in sandboxes.", &executor.Config{}, executor.DescribeMetrics},
		{"egress", "The way out of Docker sandboxes, and the only process that has to hold keys of models. It does not talk to NATS and takes nothing of every service's settings.",
			&executor.EgressSettings{}, executor.DescribeEgressMetrics},
		{"mockllm", "A scripted model server, for tests and demonstrations ([mockllm.md](mockllm.md)).", &server.Settings{}, nil},
	}
}

type sessionSettings struct {
	session.Config
	session.Gate
}

type gatewaySettings struct {
	gateway.Config
	gateway.Database
}

// Markdown is docs/operations.md.
func Markdown() (string, error) {
	commands, err := commandsOf(command.Grammar())
	if err != nil {
		return "", err
	}
	find := func(name string) (commandLine, error) {
		for _, c := range commands {
			if c.Name == name {
				return c, nil
			}
		}
		return commandLine{}, fmt.Errorf("operations: spool has no command %q", name)
	}
	t, err := template.New("operations.md").Funcs(template.FuncMap{
		"settings": func(p program) ([]Setting, error) { return settingsOf(p.cli) },
		"metrics":  func(p program) ([]metric, error) { return metricsOf(p.metrics) },
		"command":  find,
		"cell":     cell,
		"code":     code,
	}).Parse(text)
	if err != nil {
		return "", fmt.Errorf("operations: %w", err)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, map[string]any{"Programs": programs(), "Commands": commands, "Fixed": fixedInCompose(), "Kernel": command.KernelSettings()}); err != nil {
		return "", fmt.Errorf("operations: %w", err)
	}
	return out.String(), nil
}
