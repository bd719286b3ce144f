package executor

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alecthomas/kong"
)

// The zero value and the flags' defaults mean the same.
func TestDefaults(t *testing.T) {
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

func TestBadConfig(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check := func(c Config) error {
		c, err := c.withDefaults()
		if err == nil {
			c, err = c.withFolder()
		}
		if err == nil {
			_, err = c.withRunner()
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

		"egress-image: egress-admin":  {Sandbox: Docker, EgressImage: "i", EgressAdmin: "/a", EgressSockets: "/s"},
		`egress-network: "none"`:      {Sandbox: Docker, EgressImage: "i", EgressNetwork: "none"},
		`egress-network: "container:`: {Sandbox: Docker, EgressImage: "i", EgressNetwork: "container:x"},
		"anthropic-base-url":          {Sandbox: Docker, EgressImage: "i", AnthropicBaseURL: "nonsense"},
		"openai-base-url":             {Sandbox: Docker, EgressImage: "i", OpenAIBaseURL: "ftp://x"},
		"nvidia-base-url":             {Sandbox: Docker, EgressImage: "i", NVIDIABaseURL: "http://user@x"},
		"OPENAI_API_KEY":              {Sandbox: Docker, EgressImage: "i", OpenAIKey: "two words"},
	} {
		if err := check(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v does not say %q", c, err, want)
		}
	}
}

// Executors that begin at once in one folder are one engine.
func TestEngineIsKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var all sync.WaitGroup
	names := make([]string, 8)
	for i := range names {
		all.Go(func() {
			name, err := keptEngine(dir)
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

func TestModels(t *testing.T) {
	t.Parallel()
	all := Config{
		AnthropicKey: "ak", AnthropicBaseURL: "http://a", AnthropicModel: "am", OpenAIKey: "ok", OpenAIBaseURL: "http://o/v1", OpenAIModel: "om",
		NVIDIAKey: "nk", NVIDIABaseURL: "http://n/v1", NVIDIAModel: "v/nm",
	}
	nvidia := all
	nvidia.OpenAIKey, nvidia.OpenAIBaseURL = "", ""
	for name, c := range map[string]struct {
		cfg                 Config
		architecture, model string
		wantModel           string
		wantEnv             map[string]string
	}{
		"claude":                {all, "claude-code", "", "am", map[string]string{"ANTHROPIC_API_KEY": "ak", "ANTHROPIC_BASE_URL": "http://a"}},
		"claude, model given":   {all, "claude-code", "x", "x", map[string]string{"ANTHROPIC_API_KEY": "ak", "ANTHROPIC_BASE_URL": "http://a"}},
		"spool":                 {all, "spool", "", "om", map[string]string{"OPENAI_API_KEY": "ok", "OPENAI_BASE_URL": "http://o/v1"}},
		"spool, NVIDIA's model": {all, "spool", "vendor/x", "vendor/x", map[string]string{"OPENAI_API_KEY": "nk", "OPENAI_BASE_URL": "http://n/v1"}},
		"spool, NVIDIA alone":   {nvidia, "spool", "", "v/nm", map[string]string{"OPENAI_API_KEY": "nk", "OPENAI_BASE_URL": "http://n/v1"}},
		"nothing is set":        {Config{}, "spool", "", "", map[string]string{}},
	} {
		model, env := c.cfg.agent(c.architecture, c.model)
		if model != c.wantModel || !maps.Equal(env, c.wantEnv) {
			t.Errorf("%s: %s %v", name, model, env)
		}
	}
}
