package command_test

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
)

func wantField(t *testing.T, err error, field string) {
	t.Helper()
	if field == "" {
		if err != nil {
			t.Errorf("unexpected error: %v", err)
		}
		return
	}
	var refused *command.Error
	if !errors.As(err, &refused) || refused.Field != field || refused.Code != "INVALID_REQUEST" || refused.Detail == "" || strings.ContainsAny(refused.Detail, "\n\x00") {
		t.Errorf("got %v, want INVALID_REQUEST of %s", err, field)
	}
}

func TestCheckPath_RefusesPathsOutsideTheWorkspace(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"a", "a/b.txt", ".env", "..a/b..", "a b/ü", strings.Repeat("a/", 2000) + "b"} {
		wantField(t, command.CheckPath("path", path, false), "")
	}
	for _, path := range []string{
		"", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", "../workspace-other/x", "a//b", "a/", "./a", "a/.", `a\b`, `..\x`, "a\x00b", "a\xff",
		strings.Repeat("a/", 2048) + "b", strings.Repeat("a", 256),
	} {
		wantField(t, command.CheckPath("path", path, false), "path")
	}
	wantField(t, command.CheckPath("dir", "", true), "")
	wantField(t, command.CheckPath("dir", "..", true), "dir")
}

func TestFileCheck_NamesTheInvalidField(t *testing.T) {
	t.Parallel()
	sum := strings.Repeat("0f", 32)
	for _, c := range []struct {
		file  command.File
		field string
	}{
		{command.File{Path: "a", SHA256: sum, Mode: 0o755}, ""},
		{command.File{Path: "a", SHA256: sum, Object: "acme/ses_1/u-1"}, ""},
		{command.File{Archive: true, SHA256: sum}, ""},
		{command.File{SHA256: sum}, "f.path"},
		{command.File{Path: "a", SHA256: sum, Mode: 0o4755}, "f.mode"},
		{command.File{Path: "a", SHA256: strings.Repeat("0F", 32)}, "f.sha256"},
		{command.File{Path: "a"}, "f.sha256"},
	} {
		wantField(t, c.file.Check("f", "acme", "ses_1"), c.field)
	}
	for _, object := range []string{"other/ses_1/f-x", "acme/ses_10/f-x", "acme/ses_1/../ses_2/x", "acme/ses_1/"} {
		wantField(t, command.File{Path: "a", SHA256: sum, Object: object}.Check("f", "acme", "ses_1"), "f.object")
	}
}

func TestCheckOptions_NamesTheInvalidField(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		o     events.Options
		field string
	}{
		{events.Options{}, ""},
		{events.Options{SyncIntervalMs: 1000, HealthIntervalMs: 86_400_000, SandboxMaxAgeMs: 5000}, ""},
		{events.Options{SyncIntervalMs: 999}, "sessionOptions.syncIntervalMs"},
		{events.Options{HealthIntervalMs: 86_400_001}, "sessionOptions.healthIntervalMs"},
		{events.Options{SandboxMaxAgeMs: 1}, "sessionOptions.sandboxMaxAgeMs"},
		{events.Options{Image: "debian:bookworm-slim"}, ""},
		{events.Options{Image: "Registry.example.com:5000/a/b_c/d--e:V1.0@sha256:" + strings.Repeat("a", 64)}, ""},
		{events.Options{Image: "sha256:" + strings.Repeat("a", 64)}, ""},
		{events.Options{Image: "Debian"}, "sessionOptions.image"},
		{events.Options{Image: "a b"}, "sessionOptions.image"},
		{events.Options{Image: "--privileged"}, "sessionOptions.image"},
		{events.Options{Image: "a\n"}, "sessionOptions.image"},
		{events.Options{Image: strings.Repeat("a", 513)}, "sessionOptions.image"},
		{events.Options{ModelProvider: "nvidia"}, ""},
		{events.Options{ModelSettings: events.ModelSettings{Preset: "qwen", Env: map[string]string{"OPENAI_API_KEY": "${MODEL_KEY}", "A": "$$x", "GOOSE_MODEL": "${MODEL}"}, Args: []string{"-m", "${MODEL}"}}}, ""},
		{events.Options{ModelSettings: events.ModelSettings{Preset: "gpt"}}, "sessionOptions.modelSettings.preset"},
		{events.Options{ModelSettings: events.ModelSettings{Env: map[string]string{"PATH": "/x"}}}, "sessionOptions.modelSettings.env.PATH"},
		{events.Options{ModelSettings: events.ModelSettings{Env: map[string]string{"SPOOL_API_KEY": "x"}}}, "sessionOptions.modelSettings.env.SPOOL_API_KEY"},
		{events.Options{ModelSettings: events.ModelSettings{Env: map[string]string{"1_API_KEY": "x"}}}, "sessionOptions.modelSettings.env.1_API_KEY"},
		{events.Options{ModelSettings: events.ModelSettings{Env: map[string]string{"A": "${HOME}"}}}, "sessionOptions.modelSettings.env.A"},
		{events.Options{ModelSettings: events.ModelSettings{Env: map[string]string{"A": "${MODEL"}}}, "sessionOptions.modelSettings.env.A"},
		{events.Options{ModelSettings: events.ModelSettings{Args: []string{"x", "--key=${MODEL_KEY}"}}}, "sessionOptions.modelSettings.args[1]"},
		{events.Options{ModelSettings: events.ModelSettings{Args: []string{strings.Repeat("x", 4097)}}}, "sessionOptions.modelSettings.args[0]"},
		{events.Options{ModelProvider: "NVIDIA"}, "sessionOptions.modelProvider"},
		{events.Options{Command: []string{"agent", "", "--x"}}, ""},
		{events.Options{Command: []string{" "}}, "sessionOptions.command[0]"},
		{events.Options{Command: []string{"a", "b\x00"}}, "sessionOptions.command[1]"},
		{events.Options{Command: []string{"a", strings.Repeat("b", 4097)}}, "sessionOptions.command[1]"},
		{events.Options{Command: make([]string, 65)}, "sessionOptions.command"},
		{events.Options{HostPath: "/home/me/project"}, ""},
		{events.Options{HostPath: "project"}, "sessionOptions.hostPath"},
		{events.Options{HostPath: "/home/../etc"}, "sessionOptions.hostPath"},
		{events.Options{HostPath: "/home/me/"}, "sessionOptions.hostPath"},
		{events.Options{HostPath: "/home/a\nb"}, "sessionOptions.hostPath"},
		{events.Options{HostPath: "/home/\xff"}, "sessionOptions.hostPath"},
		{events.Options{HostPath: "/" + strings.Repeat("a", 4096)}, "sessionOptions.hostPath"},
		{events.Options{OnConversationLoss: "continue"}, ""},
		{events.Options{OnConversationLoss: "ask"}, "sessionOptions.onConversationLoss"},
		{events.Options{Budget: events.Budget{Turns: 1, Tokens: 2, CostUSD: 0.5, TimeMs: 3}}, ""},
		{events.Options{Budget: events.Budget{CostUSD: -1}}, "sessionOptions.budget.costUsd"},
		{events.Options{Budget: events.Budget{CostUSD: math.NaN()}}, "sessionOptions.budget.costUsd"},
		{events.Options{Egress: []string{"pypi.org", "*.example.com:8443", "GET,HEAD *.example.org"}}, ""},
		{events.Options{Egress: []string{"pypi.org", "get example.org"}}, "sessionOptions.egress[1]"},
		{events.Options{Egress: []string{"pypi.org", "https://x"}}, "sessionOptions.egress[1]"},
		{events.Options{Egress: make([]string, 257)}, "sessionOptions.egress"},
	} {
		wantField(t, command.CheckOptions(c.o), c.field)
	}
	wantField(t, command.CheckCommand("acp", nil), "sessionOptions.command")
	wantField(t, command.CheckCommand("spool", []string{"a"}), "sessionOptions.command")
	wantField(t, command.CheckCommand("acp", []string{"a"}), "")
	wantField(t, command.CheckModelProvider("claude-code", "openai"), "sessionOptions.modelProvider")
	wantField(t, command.CheckModelProvider("acp", "anthropic"), "")
	wantField(t, command.CheckModelProvider("codex", ""), "")
	qwen := events.ModelSettings{Preset: "qwen"}
	wantField(t, command.CheckModelSettings("codex", events.Options{ModelSettings: qwen}), "sessionOptions.modelSettings")
	wantField(t, command.CheckModelSettings("acp", events.Options{ModelSettings: qwen, ModelProvider: "anthropic"}), "sessionOptions.modelProvider")
	wantField(t, command.CheckModelSettings("acp", events.Options{ModelSettings: qwen, ModelProvider: "nvidia"}), "")
	named := events.ModelSettings{Args: []string{"--model=${MODEL}"}}
	wantField(t, command.CheckModelSettings("acp", events.Options{ModelSettings: named}), "sessionOptions.model")
	wantField(t, command.CheckModelSettings("acp", events.Options{ModelSettings: named, Model: "m"}), "")
}

// TestMerge_SetsKeepsAndClearsEveryOption tests that a merge can set every option, keeps an option that the request
// does not name, and can clear every option.
func TestMerge_SetsKeepsAndClearsEveryOption(t *testing.T) {
	t.Parallel()
	full := events.Options{
		Model: "m", ModelProvider: "nvidia", IdleTimeoutMs: 1, TurnLimitMs: 2, SessionLimitMs: 3, SyncIntervalMs: 4, HealthIntervalMs: 5, SandboxMaxAgeMs: 6,
		Image: "i", Command: []string{"c"}, Egress: []string{"e"}, Budget: events.Budget{Turns: 7}, HostPath: "/h", ModelSettings: events.ModelSettings{Preset: "qwen"},
		OnConversationLoss: "continue",
	}
	v, fields := reflect.ValueOf(full), reflect.TypeFor[events.Options]()
	for i := range fields.NumField() {
		if v.Field(i).IsZero() {
			t.Fatalf("option %s has no value in this test", fields.Field(i).Name)
		}
		name, _, _ := strings.Cut(fields.Field(i).Tag.Get("json"), ",")
		if name == "hostPath" { // cannot be changed after the session is created
			_, err := command.MergeOptions(full, nil, []string{name})
			wantField(t, err, "clear[0]")
			continue
		}
		got, err := command.MergeOptions(full, nil, []string{name})
		if err != nil || !reflect.ValueOf(got).Field(i).IsZero() {
			t.Errorf("%s is not cleared: %+v, %v", name, got, err)
		}
	}
	want := full
	want.HostPath = ""
	if got, err := command.MergeOptions(events.Options{}, &full, nil); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("set: %+v, %v", got, err)
	}
	wantField(t, command.CheckFixedOptions(&full), "sessionOptions.hostPath")
	wantField(t, command.CheckFixedOptions(&want), "")
	if got, err := command.MergeOptions(full, &events.Options{}, nil); err != nil || !reflect.DeepEqual(got, full) {
		t.Errorf("kept: %+v, %v", got, err)
	}
	_, err := command.MergeOptions(full, nil, []string{"model", "nonsense"})
	wantField(t, err, "clear[1]")
}
