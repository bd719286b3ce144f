package executor

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
	"github.com/spoolhq/spool/services/executor/internal/worker"
)

// openCodeModel is the OpenAI model that OpenCode uses if no setting, agent or session names one. OpenCode itself has
// no default.
const openCodeModel = "gpt-4.1-mini"

// placeholderKey is the API key that agents get if they reach models through the egress proxy. The proxy replaces it by the
// model provider's real key.
const placeholderKey = "spool"

// endpoint holds the key and the URL with which agents reach a model provider. A field is "" if it is not set.
type endpoint struct{ key, url string }

// usesProxy reports whether agents reach models through the egress proxy. All agents do, except those in local
// sandboxes.
func (c Config) usesProxy() bool { return c.Sandbox == ProviderDocker || c.Sandbox == ProviderModal }

// endpoint returns the endpoint with which agents reach a model provider.
func (c Config) endpoint(provider string) endpoint {
	if c.usesProxy() {
		route := map[string]string{
			architecture.Anthropic: runner.EgressRouteAnthropic, architecture.OpenAI: runner.EgressRouteOpenAI, architecture.NVIDIA: runner.EgressRouteNVIDIA,
		}[provider]
		return endpoint{placeholderKey, runner.EgressURL + "/" + route}
	}
	switch provider {
	case architecture.Anthropic:
		return endpoint{c.AnthropicKey, c.AnthropicBaseURL}
	case architecture.NVIDIA:
		return endpoint{c.NVIDIAKey, cmp.Or(c.NVIDIABaseURL, egress.NVIDIAURL)}
	}
	return endpoint{c.OpenAIKey, c.OpenAIBaseURL}
}

// agentLaunch returns the AgentLaunch of an agent of architecture arch: its model, command and environment. Only the agent's
// process sees this environment: the log does not contain it, and other processes of the sandbox do not have it.
func (c Config) agentLaunch(arch string, o events.Options) worker.AgentLaunch {
	provider, model := c.effectiveModel(arch, o)
	l := worker.AgentLaunch{Model: model, Env: c.modelEnvironment(arch, provider), Command: slices.Clone(o.Command)}
	c.addModelSettings(&l, provider, o.ModelSettings)
	return l
}

// addModelSettings adds the model settings of the preset that s names to l, and then the settings s of the session, which
// override them.
func (c Config) addModelSettings(l *worker.AgentLaunch, provider string, s events.ModelSettings) {
	preset, _ := architecture.FindPreset(s.Preset)
	l.Set = s.Preset != "" || len(s.Env)+len(s.Args) > 0
	at := c.endpoint(provider)
	values := map[string]string{command.PlaceholderModel: l.Model, command.PlaceholderBaseURL: cmp.Or(at.url, publicURLs()[provider]), command.PlaceholderKey: at.key}
	fill := func(template string) string {
		// The placeholders were checked when the session was created.
		out, _ := layers.ExpandPlaceholders(template, func(name string) (string, bool) { return values[name], true })
		return out
	}
	for _, env := range []map[string]string{preset.Env, s.Env} {
		for name, template := range env {
			if l.Model == "" && slices.Contains(layers.PlaceholderNames(template), command.PlaceholderModel) {
				continue
			}
			l.Env[name] = fill(template)
		}
	}
	for _, arg := range s.Args {
		l.Command = append(l.Command, fill(arg))
	}
}

// publicURLs returns the base URLs of the model providers' own APIs.
func publicURLs() map[string]string {
	return map[string]string{architecture.Anthropic: egress.AnthropicURL, architecture.OpenAI: egress.OpenAIURL, architecture.NVIDIA: egress.NVIDIAURL}
}

// modelEnvironment returns the environment variables that tell an agent of architecture arch how to reach the model
// provider.
func (c Config) modelEnvironment(arch, provider string) map[string]string {
	env := map[string]string{}
	if c.usesProxy() {
		env = map[string]string{
			"HTTP_PROXY": runner.EgressURL, "HTTPS_PROXY": runner.EgressURL, "http_proxy": runner.EgressURL, "https_proxy": runner.EgressURL,
			"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
		}
	}
	set := func(vendor string, e endpoint) {
		for name, value := range map[string]string{vendor + "_API_KEY": e.key, vendor + "_BASE_URL": e.url} {
			if value != "" {
				env[name] = value
			}
		}
	}
	if architecture.CanUse(arch, architecture.Anthropic) {
		set("ANTHROPIC", c.endpoint(architecture.Anthropic))
	}
	if !architecture.CanUse(arch, architecture.OpenAI) {
		return env
	}
	if provider == architecture.Anthropic { // an ACP agent has the variables of both APIs
		provider = architecture.OpenAI
	}
	set("OPENAI", c.endpoint(provider)) // NVIDIA's API is compatible with OpenAI's
	return env
}

// effectiveModel returns the model provider and the model that a session uses. A model of "" means the agent's own default
// model.
func (c Config) effectiveModel(arch string, o events.Options) (provider, model string) {
	provider, model = c.modelProvider(arch, o)
	switch {
	case model != "":
	case provider == architecture.Anthropic:
		model = c.AnthropicModel
	case provider == architecture.NVIDIA:
		model = c.NVIDIAModel
	default:
		model = c.OpenAIModel
		if arch == architecture.OpenCode {
			model = cmp.Or(model, openCodeModel)
		}
	}
	return provider, model
}

// modelProvider returns the model provider of a session and the session's model, "" if the session names none. If the
// setting OpenAIModel makes NVIDIA the provider, because it names a model of NVIDIA, modelProvider returns that model.
func (c Config) modelProvider(arch string, o events.Options) (provider, model string) {
	can := architecture.ModelProvidersOf(arch)
	if preset, ok := architecture.FindPreset(o.ModelSettings.Preset); ok {
		can = preset.Providers
	}
	switch {
	case o.ModelProvider != "":
		return o.ModelProvider, o.Model
	case slices.Contains(can, c.ModelProvider):
		return c.ModelProvider, o.Model
	case len(can) < 2:
		return cmp.Or(strings.Join(can, ""), architecture.OpenAI), o.Model
	}
	set := c.configuredProviders()
	has := func(provider string) bool { return set == nil || slices.Contains(set, provider) }
	asked := o.Model
	if c.usesProxy() {
		asked = cmp.Or(asked, c.OpenAIModel)
	}
	// Sessions and agents that are older than modelProvider name NVIDIA's models by vendor and a slash.
	if strings.Contains(asked, "/") && has(architecture.NVIDIA) {
		return architecture.NVIDIA, asked
	}
	if !has(architecture.OpenAI) && has(architecture.NVIDIA) {
		return architecture.NVIDIA, o.Model
	}
	return architecture.OpenAI, o.Model
}

// configuredProviders returns the names of the model providers for which the settings have a key or an address. It returns
// nil if the settings have none and agents use the egress proxy, because then only the proxy knows its providers.
func (c Config) configuredProviders() []string {
	if len(c.ModelProviders) > 0 {
		return c.ModelProviders
	}
	set := []string{}
	for provider, is := range map[string]bool{
		architecture.Anthropic: c.AnthropicKey != "" || c.AnthropicBaseURL != "",
		architecture.OpenAI:    c.OpenAIKey != "" || c.OpenAIBaseURL != "",
		architecture.NVIDIA:    c.NVIDIAKey != "",
	} {
		if is {
			set = append(set, provider)
		}
	}
	if c.usesProxy() && len(set) == 0 {
		return nil
	}
	return set
}

// checkModelProviders returns an error if the settings name an unknown model provider. It also removes empty names from
// c.ModelProviders.
func (c *Config) checkModelProviders() error {
	c.ModelProviders = slices.DeleteFunc(slices.Clone(c.ModelProviders), func(name string) bool { return name == "" })
	known := architecture.ModelProviders()
	if c.ModelProvider != "" && !slices.Contains(known, c.ModelProvider) {
		return fmt.Errorf("model-provider: %q is unknown; the model providers are %s", c.ModelProvider, strings.Join(known, ", "))
	}
	for _, name := range c.ModelProviders {
		if !slices.Contains(known, name) {
			return fmt.Errorf("model-providers: %q is unknown; the model providers are %s", name, strings.Join(known, ", "))
		}
	}
	return nil
}

// poolSizes parses the setting Pool and returns the number of sandboxes to keep in the warm pool, by architecture.
func (c Config) poolSizes() (map[string]int, error) {
	out := map[string]int{}
	for _, entry := range c.Pool {
		if entry == "" {
			continue
		}
		asked, count, _ := strings.Cut(entry, "=")
		name, ok := architecture.Canonical(asked)
		n, err := strconv.Atoi(count)
		if !ok || err != nil || n < 0 || n > maxSlots {
			return nil, fmt.Errorf("pool: %q is not an architecture (%s) and a number up to %d, like claude-code=2", entry, architecture.FormatNames(), maxSlots)
		}
		out[name] = n
	}
	return out, nil
}
