package tool_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func tools(t *testing.T, limit time.Duration) (dir string, run func(name, arguments string) tool.Result, all []tool.Tool) {
	t.Helper()
	dir = t.TempDir()
	w, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	all = append(tool.FileTools(w), tool.RunCode{Dir: dir, Environ: os.Environ(), Limit: limit})
	return dir, func(name, arguments string) tool.Result {
		for _, tl := range all {
			if tl.Name() == name {
				if _, err := tl.Paths(json.RawMessage(arguments)); err != nil {
					return tool.Result{Code: "ARGUMENTS", Output: err.Error()}
				}
				return tl.Run(t.Context(), json.RawMessage(arguments))
			}
		}
		t.Fatalf("no tool %s", name)
		return tool.Result{}
	}, all
}

func TestSchemas(t *testing.T) {
	t.Parallel()
	_, _, all := tools(t, 0)
	for _, tl := range all {
		var schema struct {
			Type       string
			Properties map[string]any
		}
		if err := json.Unmarshal(tl.Schema(), &schema); err != nil || schema.Type != "object" || len(schema.Properties) == 0 || tl.Description() == "" {
			t.Errorf("%s: %v %+v", tl.Name(), err, schema)
		}
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	dir, run, _ := tools(t, 0)
	for path, content := range map[string]string{"a.txt": "alpha", "bin": "\x00\xff\xfe\x80\x81\x82\x83\x84", "long": "x" + strings.Repeat("é", 100<<10), "sub/b.txt": "b"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc", filepath.Join(dir, "etc")); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		tool, arguments string
		code            tool.FailureCode
		says            string
	}{
		"read":           {"read_file", `{"path":"a.txt"}`, "", "alpha"},
		"read alias":     {"read_file", `{"path":"/mnt/workspace/sub/b.txt"}`, "", "b"},
		"read from":      {"read_file", `{"path":"a.txt","offset":3}`, "", "ha"},
		"read base64":    {"read_file", `{"path":"bin","encoding":"base64"}`, "", base64.StdEncoding.EncodeToString([]byte("\x00\xff\xfe\x80\x81\x82\x83\x84"))},
		"read binary":    {"read_file", `{"path":"bin"}`, tool.ExecutionError, "base64"},
		"read long":      {"read_file", `{"path":"long"}`, "", "read on from offset 131072"},
		"read on":        {"read_file", `{"path":"long","offset":131071}`, "", "éé"},
		"read folder":    {"read_file", `{"path":"sub"}`, tool.InvalidPath, "not a file"},
		"read none":      {"read_file", `{"path":"x"}`, tool.FileNotFound, "x"},
		"read out":       {"read_file", `{"path":"../x"}`, tool.PermissionDenied, "outside"},
		"read link out":  {"read_file", `{"path":"etc/passwd"}`, tool.PermissionDenied, "outside"},
		"read NUL":       {"read_file", `{"path":"a\u0000b"}`, tool.InvalidPath, "NUL"},
		"read encoding":  {"read_file", `{"path":"a.txt","encoding":"rot13"}`, "ARGUMENTS", "rot13"},
		"read offset":    {"read_file", `{"path":"a.txt","offset":-1}`, "ARGUMENTS", "negative"},
		"read no path":   {"read_file", `{}`, "ARGUMENTS", "path: is empty"},
		"write":          {"write_file", `{"path":"new/c.txt","content":"c\n"}`, "", "wrote 2 bytes to new/c.txt"},
		"write base64":   {"write_file", `{"path":"d","content":"AAE=","encoding":"base64"}`, "", "wrote 2 bytes"},
		"write bad":      {"write_file", `{"path":"d2","content":"%","encoding":"base64"}`, "ARGUMENTS", "base64"},
		"write folder":   {"write_file", `{"path":"sub","content":""}`, tool.InvalidPath, "folder"},
		"write link out": {"write_file", `{"path":"etc/evil","content":""}`, tool.PermissionDenied, "outside"},
		"write below":    {"write_file", `{"path":"a.txt/x","content":""}`, tool.InvalidPath, "a.txt"},
		"list":           {"list_directory", `{}`, "", "a.txt (5 bytes)\nbin (8 bytes)\n"},
		"list links":     {"list_directory", `{"path":"."}`, "", "etc (link)"},
		"list sub":       {"list_directory", `{"path":"sub"}`, "", "b.txt (1 bytes)"},
		"list file":      {"list_directory", `{"path":"a.txt"}`, tool.InvalidPath, "not a folder"},
		"list none":      {"list_directory", `{"path":"x/y"}`, tool.FileNotFound, "x/y"},
		"list out":       {"list_directory", `{"path":"/"}`, tool.PermissionDenied, "outside"},
	} {
		t.Run(name, func(t *testing.T) {
			if r := run(tc.tool, tc.arguments); r.Code != tc.code || !strings.Contains(r.Output, tc.says) {
				t.Errorf("%.300v", r)
			}
		})
	}
}

func TestRunCode(t *testing.T) {
	t.Parallel()
	dir, run, _ := tools(t, 3*time.Second)
	for name, tc := range map[string]struct {
		language, code string
		want           tool.FailureCode
		says           []string
	}{
		"bash":       {"bash", "pwd; echo hi >&2", "", []string{filepath.Base(dir), "[standard error]\nhi", "[exit status 0]"}},
		"python":     {"python", "import sys; print(6*7); sys.exit(0)", "", []string{"42"}},
		"imports":    {"python", "open('m.py','w').write('x=5')\nimport m\nprint(m.x)", "", []string{"5"}},
		"fails":      {"bash", "exit 4", tool.ExecutionError, []string{"[exit status 4]"}},
		"signal":     {"bash", "kill -9 $$", tool.ExecutionError, []string{"killed"}},
		"background": {"bash", "sleep 601 & echo done", "", []string{"done", "[exit status 0]"}},
		"floods":     {"bash", "echo first; head -c 5000000 /dev/zero | tr '\\0' y; echo; echo last", "", []string{"first", "bytes cut", "last"}},
		"no text":    {"bash", `printf '\377\000'`, "", []string{"\uFFFD\x00"}},
		"reads":      {"bash", "cat; echo end", "", []string{"end"}},
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := json.Marshal(map[string]string{"language": tc.language, "code": tc.code})
			if err != nil {
				t.Fatal(err)
			}
			r := run("run_code", string(raw))
			for _, s := range tc.says {
				if !strings.Contains(r.Output, s) {
					t.Errorf("no %q in %.500q", s, r.Output)
				}
			}
			if r.Code != tc.want || len(r.Output) > 200<<10 {
				t.Errorf("code %q, %d bytes", r.Code, len(r.Output))
			}
		})
	}
	for arguments, says := range map[string]string{
		`{"language":"cobol","code":"x"}`:                                   "cobol",
		`{"language":"bash","code":""}`:                                     "empty",
		`{"language":"bash","code":"` + strings.Repeat("x", 200<<10) + `"}`: "write it to a file",
		`{"language":"bash","code":"a\u0000b"}`:                             "NUL",
	} {
		if r := run("run_code", arguments); r.Code != "ARGUMENTS" || !strings.Contains(r.Output, says) {
			t.Errorf("%.60s: %v", arguments, r)
		}
	}
}

func TestRunCodeEndsTheWholeGroup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := tool.RunCode{Dir: dir, Environ: os.Environ(), Limit: 300 * time.Millisecond}
	began := time.Now()
	r := c.Run(t.Context(), json.RawMessage(`{"language":"bash","code":"trap '' TERM; sleep 602 & sleep 602 & echo started; wait"}`))
	if r.Code != tool.Timeout || !strings.Contains(r.Output, "started") || !strings.Contains(r.Output, "300ms") {
		t.Errorf("%+v", r)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("took %s", took)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := c.Run(ctx, json.RawMessage(`{"language":"bash","code":"sleep 602"}`)); r.Code == "" {
		t.Errorf("%+v", r)
	}
	if left := running(dir); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}

// running lists what has the folder as its working directory. A killed process
// is gone from /proc/…/cwd at once.
func running(dir string) (cmds []string) {
	paths, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range paths {
		if cwd, err := os.Readlink(p + "/cwd"); err == nil && cwd == dir {
			line, _ := os.ReadFile(p + "/cmdline")
			cmds = append(cmds, string(line))
		}
	}
	return cmds
}

func TestEffect(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close() //nolint:errcheck // nothing was written
	if err := os.WriteFile(filepath.Join(dir, "old"), []byte("one\ntwo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tools := map[string]tool.Tool{"run_code": tool.RunCode{Dir: dir}}
	for _, tl := range tool.FileTools(w) {
		tools[tl.Name()] = tl
	}
	paths := func(p string) events.ApprovalPreview { return events.ApprovalPreview{Paths: []string{p}} }
	for name, tc := range map[string]struct {
		tool, arguments string
		want            tool.CallEffect
	}{
		"bash":      {"run_code", `{"language":"bash","code":"rm -rf x"}`, tool.CallEffect{Kind: permission.KindShell, Command: "rm -rf x", Title: "Run a bash program", Preview: events.ApprovalPreview{Command: "rm -rf x"}}},
		"python":    {"run_code", `{"language":"python","code":"ls = 'x'"}`, tool.CallEffect{Kind: permission.KindShell, Command: `python3 -c 'ls = '\''x'\'''`, Title: "Run a Python program", Preview: events.ApprovalPreview{Command: `python3 -c 'ls = '\''x'\'''`}}},
		"read":      {"read_file", `{"path":"old"}`, tool.CallEffect{Kind: permission.KindRead, Title: "Read old", Preview: paths("old")}},
		"list":      {"list_directory", `{}`, tool.CallEffect{Kind: permission.KindRead, Title: "List .", Preview: paths(".")}},
		"new file":  {"write_file", `{"path":"new","content":"x"}`, tool.CallEffect{Kind: permission.KindEdit, Title: "Write new", Preview: events.ApprovalPreview{Paths: []string{"new"}, Text: "x"}}},
		"same file": {"write_file", `{"path":"old","content":"one\ntwo\n"}`, tool.CallEffect{Kind: permission.KindEdit, Title: "Write old", Preview: paths("old")}},
		"replace": {"write_file", `{"path":"old","content":"one\n2\n"}`, tool.CallEffect{
			Kind: permission.KindEdit, Title: "Write old",
			Preview: events.ApprovalPreview{Paths: []string{"old"}, Diff: "--- a/old\n+++ b/old\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"},
		}},
		"not text": {"write_file", `{"path":"old","content":"/w==","encoding":"base64"}`, tool.CallEffect{
			Kind: permission.KindEdit, Title: "Write old", Preview: events.ApprovalPreview{Paths: []string{"old"}, Text: "binary content, 1 bytes"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tools[tc.tool].Effect(json.RawMessage(tc.arguments)); !reflect.DeepEqual(got, tc.want) {
				t.Errorf("effect %+v, want %+v", got, tc.want)
			}
		})
	}
}
