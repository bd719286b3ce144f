package operations

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// The lines of deploy/compose.yaml between these two are generated: the settings of the service in whose
// environment they stand.
const (
	composeBegin     = "# Generated from the settings of %s by `make generate`; do not edit."
	composeEndMarker = "# End of the generated settings."
)

// everyService is the name of the section of docs/operations.md with the settings that all services have.
const everyService = "every service"

// logServices is the name of the section of docs/operations.md with the settings of the services that open the log.
const logServices = "services with the log"

// Fixed is a setting to which compose.yaml gives a value, so that the variable of the same name in deploy/.env has no
// effect.
type Fixed struct {
	Program, Variable string
	Instead           string // what sets it, or why it has no effect
}

// fixedInCompose returns all settings that deploy/.env cannot set by their own names.
func fixedInCompose() []Fixed {
	return []Fixed{
		{everyService, "SPOOL_NATS_URL", "the service nats"},
		{everyService, "SPOOL_NATS_USER", "each service's own"},
		{everyService, "SPOOL_NATS_PASSWORD", "SPOOL_NATS_PASSWORD_ and the service's name"},
		{everyService, "SPOOL_NATS_CA", "the file in the volume certificates-public"},
		{logServices, "SPOOL_LOG_KEYS", "SPOOL_LOG_KEY_ and the writer's name; skills and janitor have only their own"},
		{everyService, "SPOOL_METRICS_LISTEN", "port 9090 of the network core"},
		{"session", "SPOOL_SANDBOX_PROVIDERS", "docker"},
		{"session", "SPOOL_NATS_GATE_PASSWORD", "SPOOL_NATS_PASSWORD_GATE"},
		{"session", "SPOOL_HEADS_KEY_FILE", "SPOOL_HEADS_KEY"},
		{"projector", "SPOOL_DATABASE_URL", "the service postgres, with SPOOL_POSTGRES_PASSWORD_PROJECTOR"},
		{"janitor", "SPOOL_DATABASE_URL", "the service postgres, with SPOOL_POSTGRES_PASSWORD_PROJECTOR"},
		{"skills", "SPOOL_SKILL_SCRATCH", "the volume skills-scratch"},
		{"gateway", "SPOOL_LISTEN", "SPOOL_GATEWAY_ADDRESS and SPOOL_GATEWAY_PORTS"},
		{"gateway", "SPOOL_GRPC_LISTEN", "SPOOL_GATEWAY_ADDRESS and SPOOL_GATEWAY_GRPC_PORTS"},
		{"gateway", "SPOOL_PUBLISHED_ADDRESS", "SPOOL_GATEWAY_ADDRESS"},
		{"gateway", "SPOOL_AUTH", "keys"},
		{"gateway", "SPOOL_DATABASE_URL", "the service postgres, with SPOOL_POSTGRES_PASSWORD_GATEWAY"},
		{"gateway", "SPOOL_SECRETS_RECIPIENT", "the file in the volume secrets-public"},
		{"gateway", "SPOOL_SECRETS_RECIPIENT_FILE", "the file in the volume secrets-public"},
		{"executor", "SPOOL_DATA_DIR", "the container stores nothing"},
		{"executor", "SPOOL_RUNNER", "in the image"},
		{"executor", "SPOOL_ENGINE", "SPOOL_PROJECT"},
		{"executor", "SPOOL_ADDRESS", "the container's own name"},
		{"executor", "SPOOL_SANDBOX", "docker"},
		{"executor", "SPOOL_DOCKER_HOST", "SPOOL_DOCKER_SOCKET"},
		{"executor", "SPOOL_EGRESS_SOCKETS", "a volume of SPOOL_PROJECT"},
		{"executor", "SPOOL_EGRESS_ADMIN", "the volume egress-admin"},
		{"executor", "SPOOL_EGRESS_SERVER", "compose.modal.yaml passes it on"},
		{"executor", "SPOOL_EGRESS_AUTHORITY", "with compose.modal.yaml the file in the volume certificates-public"},
		{"executor", "SPOOL_MODAL_TOKEN_SECRET_FILE", "SPOOL_MODAL_TOKEN_SECRET has the secret"},
		{"executor", "SPOOL_EGRESS_IMAGE", "the service egress is the proxy"},
		{"executor", "SPOOL_EGRESS_NETWORK", "the service egress is the proxy"},
		{"executor", "SPOOL_SECRETS_KEY", "the file in the volume secrets-private"},
		{"executor", "SPOOL_SECRETS_KEY_FILE", "the file in the volume secrets-private"},
		{"executor", "SPOOL_MODEL_PROVIDERS", "the providers for which the service egress has a key or an address"},
		{"executor", "ANTHROPIC_API_KEY", "only the service egress has it"},
		{"executor", "SPOOL_ANTHROPIC_BASE_URL", "only the service egress has it"},
		{"executor", "OPENAI_API_KEY", "only the service egress has it"},
		{"executor", "SPOOL_OPENAI_BASE_URL", "only the service egress has it"},
		{"executor", "NVIDIA_API_KEY", "only the service egress has it"},
		{"executor", "SPOOL_NVIDIA_BASE_URL", "only the service egress has it"},
		{"egress", "SPOOL_EGRESS_LISTEN_SANDBOXES", "the volume egress-sockets"},
		{"egress", "SPOOL_EGRESS_LISTEN_ADMIN", "the volume egress-admin"},
		{"egress", "SPOOL_EGRESS_LISTEN_TLS", "with compose.modal.yaml SPOOL_EGRESS_ADDRESS and SPOOL_EGRESS_PORT"},
		{"egress", "SPOOL_EGRESS_TLS_CERTIFICATE", "with compose.modal.yaml the file in the volume certificates-egress"},
		{"egress", "SPOOL_EGRESS_TLS_KEY", "with compose.modal.yaml the file in the volume certificates-egress"},
		{"egress", "SPOOL_EGRESS_LISTEN_METRICS", "port 9090 of the network core"},
		{"egress", "SPOOL_EGRESS_DATA", "the volume egress-data"},
		{"mockllm", "SPOOL_MOCKLLM_LISTEN", "port 7799 of the network core"},
	}
}

func isFixed(program, variable string) bool {
	return slices.ContainsFunc(fixedInCompose(), func(f Fixed) bool { return f.Program == program && f.Variable == variable })
}

// composeLine returns the line of compose.yaml that passes a setting to its container.
func composeLine(s Setting) string {
	return fmt.Sprintf("%s: ${%s:-%s}", s.Variable, s.Variable, s.Default)
}

// Compose returns compose.yaml with its generated lines replaced. They contain each setting of a service that the
// rest of the service's environment does not set, unless the setting is fixed.
func Compose(current []byte) ([]byte, error) {
	hand, err := environments(withoutGenerated(current))
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	made, skipping := map[string]bool{}, false
	for line := range bytes.Lines(current) {
		text := strings.TrimSpace(string(line))
		if skipping {
			if skipping = text != composeEndMarker; skipping {
				continue
			}
		}
		out.Write(line)
		for _, p := range programs() {
			if text != fmt.Sprintf(composeBegin, p.Name) {
				continue
			}
			indent, _, _ := strings.Cut(string(line), "#")
			list, err := settingsOf(p.cli)
			if err != nil {
				return nil, err
			}
			for _, s := range list {
				if _, byHand := hand[p.Name][s.Variable]; !byHand && !isFixed(p.Name, s.Variable) {
					out.WriteString(indent + composeLine(s) + "\n")
				}
			}
			made[p.Name], skipping = true, true
		}
	}
	if skipping {
		return nil, fmt.Errorf("compose.yaml: a block of generated settings has no line %q", composeEndMarker)
	}
	return out.Bytes(), nil
}

// withoutGenerated returns compose.yaml without the generated lines.
func withoutGenerated(current []byte) []byte {
	var out bytes.Buffer
	skipping := false
	begin, _, _ := strings.Cut(composeBegin, "%s")
	for line := range bytes.Lines(current) {
		text := strings.TrimSpace(string(line))
		if strings.HasPrefix(text, begin) {
			skipping = true
		}
		if !skipping {
			out.Write(line)
		}
		if text == composeEndMarker {
			skipping = false
		}
	}
	return out.Bytes()
}

// environments returns the environment of each service of compose.yaml, before interpolation.
func environments(raw []byte) (map[string]map[string]string, error) {
	var file struct {
		Services map[string]struct {
			Environment map[string]string
		}
	}
	if err := yaml.Unmarshal(raw, &file); err != nil {
		return nil, fmt.Errorf("compose.yaml: %w", err)
	}
	out := map[string]map[string]string{}
	for name, s := range file.Services {
		out[name] = s.Environment
	}
	return out, nil
}
