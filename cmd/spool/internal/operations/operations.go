// Package operations generates docs/operations.md: every setting, from the structs that the programs parse, every
// metric, from what they register, and how to operate an installation. It also generates the lines of
// deploy/compose.yaml that pass the settings on.
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

// markdownTemplate is the template of docs/operations.md.
//
//go:embed operations.md.tmpl
var markdownTemplate string

// documentedProgram is a program of Spool whose settings and metrics are listed in a section of docs/operations.md.
type documentedProgram struct {
	Name, Doc string
	cli       any // the struct that kong parses into
	metrics   func(prometheus.Registerer)
}

// documentedPrograms returns the programs that docs/operations.md documents, in the order of their sections.
func documentedPrograms() []documentedProgram {
	return []documentedProgram{
		{"every service", "Session, projector, janitor, skills, gateway and executor have these settings.", &daemon.Settings{},
			func(r prometheus.Registerer) { daemon.RegisterConnectionMetrics(r, nil) }},
		{logServicesSection, "Session, projector, janitor, skills and executor also have this setting ([security.md](security.md)).", &daemon.LogSettings{}, nil},
		{"session", "Owns the life of sessions.", &sessionSettings{}, session.DescribeMetrics},
		{"projector", "Folds the log into Postgres.", &projector.Config{}, projector.DescribeMetrics},
		{"janitor", "Permanently removes the content of deleted sessions and unreferenced objects ([security.md](security.md)).", &janitor.Config{}, janitor.DescribeMetrics},
		{"skills", "Validates and stores skills.", &skills.Config{}, skills.DescribeMetrics},
		{"gateway", "Serves clients. Its listener also serves /healthz and /readyz, and /metrics to the root key, or to everybody if API keys are off.", &gatewaySettings{}, gateway.DescribeMetrics},
		{"executor", "Runs agents in sandboxes.", &executor.Config{}, executor.DescribeMetrics},
		{"egress", "The egress proxy of Docker sandboxes, and the only process that needs the keys of models. It does not use NATS and has none of the settings of every service.",
			&executor.EgressSettings{}, executor.DescribeEgressMetrics},
		{"mockllm", "A scripted model server, for tests and demonstrations ([mockllm.md](mockllm.md)).", &server.Settings{}, nil},
	}
}

// sessionSettings holds all settings of the session service.
type sessionSettings struct {
	session.Config
	session.ConsumerGate
}

// gatewaySettings holds all settings of the gateway.
type gatewaySettings struct {
	gateway.Config
	gateway.Database
}

// GenerateMarkdown returns the content of docs/operations.md.
func GenerateMarkdown() (string, error) {
	commands, err := spoolCommands()
	if err != nil {
		return "", err
	}
	find := func(name string) (spoolCommand, error) {
		for _, c := range commands {
			if c.Name == name {
				return c, nil
			}
		}
		return spoolCommand{}, fmt.Errorf("operations: spool has no command %q", name)
	}
	t, err := template.New("operations.md").Funcs(template.FuncMap{
		"settings": func(p documentedProgram) ([]Setting, error) { return parseSettings(p.cli) },
		"metrics":  func(p documentedProgram) ([]metricDescription, error) { return registeredMetrics(p.metrics) },
		"command":  find,
		"cell":     escapeCell,
		"code":     inlineCode,
	}).Parse(markdownTemplate)
	if err != nil {
		return "", fmt.Errorf("operations: %w", err)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, map[string]any{"Programs": documentedPrograms(), "Commands": commands, "Fixed": fixedSettings(), "Kernel": command.KernelSettings()}); err != nil {
		return "", fmt.Errorf("operations: %w", err)
	}
	return out.String(), nil
}
