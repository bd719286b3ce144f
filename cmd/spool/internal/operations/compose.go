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
	composeBeginMarker = "# Generated from the settings of %s by `make generate`; do not edit."
	composeEndMarker   = "# End of the generated settings."
)

// everyServiceSection is the name of the section of docs/operations.md with the settings that all services have.
const everyServiceSection = "every service"

// logServicesSection is the name of the section of docs/operations.md with the settings of the services that open the
// log.
const logServicesSection = "services with the log"

// FixedSetting is a setting whose value deploy/compose.yaml fixes, so that the variable of the same name in deploy/.env
// has no effect.
type FixedSetting struct {
	Program, Variable string
	Instead           string // what sets it, or why it has no effect
}

// fixedSettings returns all settings whose values deploy/compose.yaml fixes.
func fixedSettings() []FixedSetting {
	return []FixedSetting{
		{everyServiceSection, "SPOOL_NATS_URL", "the service nats"},
		{everyServiceSection, "SPOOL_NATS_USER", "each service's own"},
		{everyServiceSection, "SPOOL_NATS_PASSWORD", "SPOOL_NATS_PASSWORD_ and the service's name"},
		{everyServiceSection, "SPOOL_NATS_CA", "the file in the volume certificates-public"},
		{logServicesSection, "SPOOL_LOG_KEYS", "SPOOL_LOG_KEY_ and the writer's name; skills and janitor have only their own"},
		{everyServiceSection, "SPOOL_METRICS_LISTEN", "port 9090 of the network core"},
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

// isFixedSetting reports whether deploy/compose.yaml fixes the value of a program's variable.
func isFixedSetting(program, variable string) bool {
	return slices.ContainsFunc(fixedSettings(), func(f FixedSetting) bool { return f.Program == program && f.Variable == variable })
}

// composeLine returns the line of deploy/compose.yaml that passes a setting to the container of its service.
func composeLine(s Setting) string {
	return fmt.Sprintf("%s: ${%s:-%s}", s.Variable, s.Variable, s.Default)
}

// GenerateCompose returns deploy/compose.yaml with its generated lines replaced. These lines pass each setting to its
// service, except fixed settings, and those that the handwritten lines of the service set.
func GenerateCompose(current []byte) ([]byte, error) {
	hand, err := serviceEnvironments(removeGeneratedLines(current))
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
		for _, p := range documentedPrograms() {
			if text != fmt.Sprintf(composeBeginMarker, p.Name) {
				continue
			}
			indent, _, _ := strings.Cut(string(line), "#")
			list, err := parseSettings(p.cli)
			if err != nil {
				return nil, err
			}
			for _, s := range list {
				if _, byHand := hand[p.Name][s.Variable]; !byHand && !isFixedSetting(p.Name, s.Variable) {
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

// removeGeneratedLines returns deploy/compose.yaml without the generated lines.
func removeGeneratedLines(current []byte) []byte {
	var out bytes.Buffer
	skipping := false
	begin, _, _ := strings.Cut(composeBeginMarker, "%s")
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

// serviceEnvironments returns the environment variables of each service in deploy/compose.yaml, before Compose replaces
// ${...}.
func serviceEnvironments(raw []byte) (map[string]map[string]string, error) {
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
