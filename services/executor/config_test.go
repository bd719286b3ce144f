package executor

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

// The zero value and the flags' defaults are the same configuration.
func TestDefaults_MatchTheFlags(t *testing.T) {
	t.Parallel()
	var flags Config
	parser, err := kong.New(&flags)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parser.Parse(nil); err != nil {
		t.Fatal(err)
	}
	for _, key := range []*string{&flags.AnthropicKey, &flags.OpenAIKey, &flags.NVIDIAKey, &flags.AnthropicBaseURL, &flags.OpenAIBaseURL} {
		*key = "" // of the machine that runs the test
	}
	a, err := flags.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	b, err := Config{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(a, b) {
		t.Errorf("flags %+v\nzero  %+v", a, b)
	}
	if b.Slots < 4 || b.WarmMemory <= 0 {
		t.Errorf("defaults: %+v", b)
	}
}

// TestEndpoint_UsesNVIDIAsOwnAddressIfNoneIsSet tests that local agents, which do not use the egress proxy, get the address
// that the proxy uses too.
func TestEndpoint_UsesNVIDIAsOwnAddressIfNoneIsSet(t *testing.T) {
	t.Parallel()
	c, err := Config{NVIDIAKey: "nk"}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := c.endpoint(architecture.NVIDIA), (endpoint{"nk", egress.NVIDIAURL}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestNew_RefusesInvalidConfig(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check := func(c Config) error {
		c, err := c.withDefaults()
		if err == nil {
			c, err = c.withDataFolder()
		}
		if err == nil {
			_, err = c.withRunnerPath()
		}
		return err
	}
	for want, c := range map[string]Config{
		"slots":         {Slots: -1},
		"max-attempts":  {MaxAttempts: -1},
		"beat":          {Beat: time.Nanosecond},
		"commit-window": {CommitWindow: -time.Second},
		"data-dir":      {DataDir: filepath.Join(file, "below")},
		"engine":        {DataDir: t.TempDir(), Engine: "a.b"},
		"runner":        {DataDir: t.TempDir(), Runner: file},
		"runner: no":    {DataDir: t.TempDir()},
		"sandbox-uids":  {SandboxUIDs: "10000-20000"},

		"egress-image: egress-admin":  {Sandbox: ProviderDocker, EgressImage: "i", EgressAdmin: "/a", EgressSockets: "/s"},
		`egress-network: "none"`:      {Sandbox: ProviderDocker, EgressImage: "i", EgressNetwork: "none"},
		`egress-network: "container:`: {Sandbox: ProviderDocker, EgressImage: "i", EgressNetwork: "container:x"},
		"anthropic-base-url":          {Sandbox: ProviderDocker, EgressImage: "i", AnthropicBaseURL: "nonsense"},
		"openai-base-url":             {Sandbox: ProviderDocker, EgressImage: "i", OpenAIBaseURL: "ftp://x"},
		"nvidia-base-url":             {Sandbox: ProviderDocker, EgressImage: "i", NVIDIABaseURL: "http://user@x"},
		"OPENAI_API_KEY":              {Sandbox: ProviderDocker, EgressImage: "i", OpenAIKey: "two words"},
	} {
		if err := check(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v does not say %q", c, err, want)
		}
	}
}

// Executors that start at once in one folder get the same engine.
func TestEngineIsKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var all sync.WaitGroup
	names := make([]string, 8)
	for i := range names {
		all.Go(func() {
			name, err := storedEngine(dir)
			if err != nil {
				t.Error(err)
			}
			names[i] = name
		})
	}
	all.Wait()
	for _, n := range names {
		if n != names[0] || len(n) < 8 {
			t.Fatalf("engines %v", names)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
}

func TestModels_FollowArchitectureAndSettings(t *testing.T) {
	t.Parallel()
	all := Config{
		AnthropicKey: "ak", AnthropicBaseURL: "http://a", AnthropicModel: "am", OpenAIKey: "ok", OpenAIBaseURL: "http://o/v1", OpenAIModel: "om",
		NVIDIAKey: "nk", NVIDIABaseURL: "http://n/v1", NVIDIAModel: "v/nm",
	}
	nvidia := all
	nvidia.OpenAIKey, nvidia.OpenAIBaseURL, nvidia.OpenAIModel = "", "", ""
	docker := func(c Config) Config { c.Sandbox = ProviderDocker; return c }
	// In compose the egress proxy has the keys, and the executor has only the models.
	proxied := func(set ...string) Config {
		return Config{Sandbox: ProviderDocker, AnthropicModel: "am", NVIDIAModel: "v/nm", ModelProviders: set}
	}
	prefers := all
	prefers.ModelProvider = "nvidia"
	claude := map[string]string{"ANTHROPIC_API_KEY": "ak", "ANTHROPIC_BASE_URL": "http://a"}
	openAI := map[string]string{"OPENAI_API_KEY": "ok", "OPENAI_BASE_URL": "http://o/v1"}
	nv := map[string]string{"OPENAI_API_KEY": "nk", "OPENAI_BASE_URL": "http://n/v1"}
	both := func(openAI map[string]string) map[string]string {
		out := maps.Clone(claude)
		maps.Copy(out, openAI)
		return out
	}
	by := func(routes ...string) map[string]string {
		out := map[string]string{}
		for _, route := range routes {
			vendor := "OPENAI"
			if route == "anthropic" {
				vendor = "ANTHROPIC"
			}
			out[vendor+"_API_KEY"], out[vendor+"_BASE_URL"] = "spool", "http://127.0.0.1:7070/"+route
		}
		return out
	}
	for name, c := range map[string]struct {
		cfg                   Config
		runs, asked, provider string
		wantModel             string
		wantEnv               map[string]string
	}{
		"claude":                {all, "claude-code", "", "", "am", claude},
		"claude, model given":   {all, "claude-code", "x", "", "x", claude},
		"claude, with a slash":  {all, "claude-code", "v/x", "", "v/x", claude},
		"spool":                 {all, "spool", "", "", "om", openAI},
		"spool, NVIDIA's model": {all, "spool", "vendor/x", "", "vendor/x", nv},
		"spool, NVIDIA alone":   {nvidia, "spool", "", "", "v/nm", nv},
		"nothing is set":        {Config{}, "spool", "", "", "", map[string]string{}},
		"opencode's default":    {Config{OpenAIKey: "ok"}, "opencode", "", "", "gpt-4.1-mini", map[string]string{"OPENAI_API_KEY": "ok"}},
		"acp":                   {all, "acp", "", "", "om", both(openAI)},

		"named: a slash is part of the name": {all, "spool", "vendor/x", "openai", "vendor/x", openAI},
		"named: NVIDIA without a slash":      {all, "codex", "plain", "nvidia", "plain", nv},
		"named: NVIDIA's default model":      {all, "opencode", "", "nvidia", "v/nm", nv},
		"named: acp with Anthropic's model":  {all, "acp", "", "anthropic", "am", both(openAI)},
		"named: acp by NVIDIA":               {all, "acp", "m", "nvidia", "m", both(nv)},
		"the executor's default":             {prefers, "spool", "plain", "", "plain", nv},
		"named beside the default":           {prefers, "spool", "", "openai", "om", openAI},
		"the default is not for claude":      {prefers, "claude-code", "", "", "am", claude},

		"docker: OpenAI":                   {docker(all), "spool", "", "", "om", by("openai")},
		"docker: NVIDIA's model":           {docker(all), "spool", "v/x", "", "v/x", by("nvidia")},
		"docker: named":                    {docker(all), "spool", "v/x", "openai", "v/x", by("openai")},
		"docker: NVIDIA alone":             {docker(nvidia), "spool", "", "", "v/nm", by("nvidia")},
		"docker: NVIDIA alone, opencode":   {docker(nvidia), "opencode", "", "", "v/nm", by("nvidia")},
		"docker: claude":                   {docker(all), "claude-code", "", "", "am", by("anthropic")},
		"docker: acp":                      {docker(all), "acp", "", "anthropic", "am", by("anthropic", "openai")},
		"proxy: nothing is known":          {proxied(), "spool", "", "", "", by("openai")},
		"proxy: nothing is known, slash":   {proxied(), "spool", "v/x", "", "v/x", by("nvidia")},
		"proxy: NVIDIA alone":              {proxied("nvidia"), "spool", "", "", "v/nm", by("nvidia")},
		"proxy: NVIDIA alone, codex":       {proxied("nvidia"), "codex", "", "", "v/nm", by("nvidia")},
		"proxy: no NVIDIA, slash":          {proxied("openai"), "spool", "v/x", "", "v/x", by("openai")},
		"proxy: all, slash":                {proxied("openai", "nvidia"), "spool", "v/x", "", "v/x", by("nvidia")},
		"proxy: the model of the executor": {Config{Sandbox: ProviderDocker, OpenAIModel: "v/om"}, "spool", "", "", "v/om", by("nvidia")},
	} {
		launch := c.cfg.agentLaunch(c.runs, events.Options{Model: c.asked, ModelProvider: c.provider})
		model, env := launch.Model, launch.Env
		maps.DeleteFunc(env, func(name, _ string) bool { return strings.HasSuffix(strings.ToUpper(name), "_PROXY") })
		if model != c.wantModel || !maps.Equal(env, c.wantEnv) {
			t.Errorf("%s: %s %v", name, model, env)
		}
	}
	for want, c := range map[string]Config{"model-provider:": {ModelProvider: "gpt"}, "model-providers:": {ModelProviders: []string{"openai", "gpt"}}} {
		if _, err := c.withDefaults(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s %v", want, err)
		}
	}
	if c, err := (Config{ModelProviders: []string{"", "nvidia", ""}}).withDefaults(); err != nil || strings.Join(c.ModelProviders, ",") != "nvidia" {
		t.Errorf("empty entries: %v, %v", c.ModelProviders, err)
	}
}

// An ACP agent gets model, base URL and key in the variables that its preset and its session name.
func TestModelSettings_ReachAnACPAgent(t *testing.T) {
	t.Parallel()
	local := Config{OpenAIKey: "ok", OpenAIBaseURL: "http://o/v1", AnthropicKey: "ak", NVIDIAKey: "nk", NVIDIABaseURL: "http://n/v1"}
	docker := local
	docker.Sandbox = ProviderDocker
	own := events.ModelSettings{
		Env:  map[string]string{"AGENT_KEY": "${MODEL_KEY}", "AGENT_URL": "${MODEL_BASE_URL}/chat", "AGENT_MODEL": "${MODEL}", "PRICE": "$$1"},
		Args: []string{"--url", "${MODEL_BASE_URL}", "--model=${MODEL}"},
	}
	for name, c := range map[string]struct {
		cfg     Config
		o       events.Options
		env     map[string]string
		command string
	}{
		"qwen":           {local, events.Options{Model: "m", ModelSettings: events.ModelSettings{Preset: "qwen"}}, map[string]string{"OPENAI_API_KEY": "ok", "OPENAI_BASE_URL": "http://o/v1", "OPENAI_MODEL": "m"}, "agent"},
		"qwen by NVIDIA": {local, events.Options{Model: "m", ModelProvider: "nvidia", ModelSettings: events.ModelSettings{Preset: "qwen"}}, map[string]string{"OPENAI_API_KEY": "nk", "OPENAI_BASE_URL": "http://n/v1"}, "agent"},
		"qwen in docker": {docker, events.Options{Model: "m", ModelSettings: events.ModelSettings{Preset: "qwen"}}, map[string]string{"OPENAI_API_KEY": "spool", "OPENAI_BASE_URL": "http://127.0.0.1:7070/openai"}, "agent"},
		"claude":         {local, events.Options{Model: "m", ModelSettings: events.ModelSettings{Preset: "claude"}}, map[string]string{"ANTHROPIC_API_KEY": "ak", "ANTHROPIC_BASE_URL": "https://api.anthropic.com", "ANTHROPIC_MODEL": "m"}, "agent"},
		"no model":       {local, events.Options{ModelSettings: events.ModelSettings{Preset: "claude"}}, map[string]string{"ANTHROPIC_API_KEY": "ak", "ANTHROPIC_MODEL": ""}, "agent"},
		"own, docker":    {docker, events.Options{Model: "m", ModelSettings: own}, map[string]string{"AGENT_KEY": "spool", "AGENT_URL": "http://127.0.0.1:7070/openai/chat", "AGENT_MODEL": "m", "PRICE": "$1"}, "agent --url http://127.0.0.1:7070/openai --model=m"},
		"over a preset":  {local, events.Options{Model: "m", ModelSettings: events.ModelSettings{Preset: "qwen", Env: map[string]string{"OPENAI_MODEL": "x-${MODEL}"}}}, map[string]string{"OPENAI_MODEL": "x-m"}, "agent"},
	} {
		c.o.Command = []string{"agent"}
		l := c.cfg.agentLaunch("acp", c.o)
		for key, want := range c.env {
			if l.Env[key] != want {
				t.Errorf("%s: %s is %q, want %q", name, key, l.Env[key], want)
			}
		}
		if strings.Join(l.Command, " ") != c.command || !l.Set {
			t.Errorf("%s: command %q, set %t", name, l.Command, l.Set)
		}
	}
	l := local.agentLaunch("acp", events.Options{Model: "m", Command: []string{"opencode", "acp"}, ModelSettings: events.ModelSettings{Preset: "opencode"}})
	var config struct {
		Model    string
		Provider map[string]struct {
			Options struct{ BaseURL, APIKey string }
		}
	}
	if err := json.Unmarshal([]byte(l.Env["OPENCODE_CONFIG_CONTENT"]), &config); err != nil || config.Model != "spool/m" || config.Provider["spool"].Options.BaseURL != "http://o/v1" {
		t.Errorf("opencode: %v %+v", err, config)
	}
	if l := local.agentLaunch("acp", events.Options{Model: "m", Command: []string{"a"}}); l.Set || len(l.Command) != 1 {
		t.Errorf("without settings: %+v", l)
	}
}

// The pool uses the name of the architecture, for which turns look, also if the setting names an alias.
func TestPoolTakesAliases(t *testing.T) {
	t.Parallel()
	got, err := Config{Pool: []string{"claude-sdk=2", "codex=1"}}.poolSizes()
	if err != nil || !maps.Equal(got, map[string]int{"claude-code": 2, "codex": 1}) {
		t.Errorf("pool %v, %v", got, err)
	}
	for _, entry := range []string{"cobol=1", "=1", "codex", "codex=x", "codex=-1"} {
		if _, err := (Config{Pool: []string{entry}}).poolSizes(); err == nil || !strings.Contains(err.Error(), "pool: ") {
			t.Errorf("%s: %v", entry, err)
		}
	}
}
