package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// TestPermit_ShowsWhatACallDoesWhole tests that command, folder, files and hosts of a call are complete in the request,
// with the characters escaped that a reader would not see, and that the files and hosts are those that the policy checks.
func TestPermit_ShowsWhatACallDoesWhole(t *testing.T) {
	t.Parallel()
	a := newAsking(t)
	command := "ls " + strings.Repeat(" ", 5000) + "\n" + strings.Repeat("# line\n", 2000) + "\u3164\u034f\u202e\u200b\ufe0f\U000e0061rm -rf ~"
	paths, call := make([]string, 300), permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: command, Hosts: []string{"evil.example", "e\u200bvil"}}
	for i := range paths {
		paths[i] = fmt.Sprintf("file %d", i)
	}
	call.Paths = []permission.Path{{Path: "file 1"}, {Path: "not\u202eshown"}}
	a.RequestPermission(events.MainConversation, agent.PermissionRequest{
		Key: "a", Call: call, Title: "List\nfiles", Reason: "I only list.\n\u202ecommand: ls",
		Preview: events.ApprovalPreview{Command: command, Cwd: "/tmp\u3164", Paths: paths, URL: "https://evil.example/\u2066", Diff: "+a\r\n", Text: "b\x1b]0;\nc\x07"},
	}, func(agent.PermissionAnswer) {})
	r, _ := a.requested(0)
	escapes := strings.NewReplacer("\u3164", `\u{3164}`, "\u034f", `\u{34f}`, "\u202e", `\u{202e}`, "\u200b", `\u{200b}`, "\ufe0f", `\u{fe0f}`, "\U000e0061", `\u{e0061}`)
	want := events.ApprovalPreview{
		Command: escapes.Replace(command), Cwd: `/tmp\u{3164}`, Paths: append(paths, `not\u{202e}shown`), Hosts: []string{"evil.example", `e\u{200b}vil`},
		URL: `https://evil.example/\u{2066}`, Diff: "+a\\u{d}\n", Text: "b\\u{1b}]0;\nc\\u{7}",
	}
	p := r.Preview
	if p.Command != want.Command || p.Cwd != want.Cwd || !slices.Equal(p.Paths, want.Paths) || !slices.Equal(p.Hosts, want.Hosts) || p.URL != want.URL || p.Diff != want.Diff || p.Text != want.Text || p.Truncated || p.Cut != nil {
		t.Errorf("got %.200q…\n%+v", p.Command[max(0, len(p.Command)-200):], p.Paths[len(p.Paths)-1:])
	}
	if r.Title != `List\u{a}files` || r.Reason != "I only list.\n\\u{202e}command: ls" {
		t.Errorf("title %q, reason %q", r.Title, r.Reason)
	}
}

// TestPermit_ShowsWhereALinkLeads tests that a person sees the file that a call changes, if the call names it by a link.
func TestPermit_ShowsWhereALinkLeads(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	link := filepath.Join(root, "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	for named, want := range map[string][]string{
		"docs/.env": {"docs/.env", ".env"}, link + "/docs/.env": {link + "/docs/.env", ".env"}, ".env": {".env"}, "./.env": {"./.env"}, link + "/.env": {link + "/.env"}, root + "/.env": {root + "/.env"},
	} {
		a := newAsking(t, func(c *agent.TurnConfig) { c.Workspace = link })
		a.RequestPermission(events.MainConversation, agent.PermissionRequest{
			Key: "a", Call: permission.Call{Tool: "Bash", Kind: permission.KindEdit, Paths: []permission.Path{{Path: ".env"}}}, Preview: events.ApprovalPreview{Paths: []string{named}},
		}, func(agent.PermissionAnswer) {})
		if r, _ := a.requested(0); !slices.Equal(r.Preview.Paths, want) {
			t.Errorf("%s: a person sees %q, want %q", named, r.Preview.Paths, want)
		}
	}
	a := newAsking(t, func(c *agent.TurnConfig) { c.Workspace = root })
	a.RequestPermission(events.MainConversation, agent.PermissionRequest{
		Key: "a", Call: permission.Call{Tool: "Bash", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "/etc/hosts", Outside: true}}}, Preview: events.ApprovalPreview{Paths: []string{root + "/etc/hosts"}},
	}, func(agent.PermissionAnswer) {})
	if r, _ := a.requested(0); len(r.Preview.Paths) != 2 {
		t.Errorf("a link that leads out: a person sees %q", r.Preview.Paths)
	}
}

// TestPermit_RefusesACallTooLargeToShow tests that a call is denied, and no person is asked, if a field that says what
// it does is larger than what a person can be shown.
func TestPermit_RefusesACallTooLargeToShow(t *testing.T) {
	t.Parallel()
	const limit = 128 << 10
	many := make([]string, limit/4)
	for i := range many {
		many[i] = fmt.Sprintf("f%d", i)
	}
	for field, c := range map[string]struct {
		largest, larger events.ApprovalPreview
	}{
		"command":  {events.ApprovalPreview{Command: strings.Repeat("x", limit)}, events.ApprovalPreview{Command: strings.Repeat("x", limit) + ";rm"}},
		"escapes":  {events.ApprovalPreview{Command: strings.Repeat("\u3164", limit/8)}, events.ApprovalPreview{Command: strings.Repeat("\u3164", limit/8) + "x"}},
		"folder":   {events.ApprovalPreview{Cwd: strings.Repeat("x", limit)}, events.ApprovalPreview{Cwd: strings.Repeat("x", limit+1)}},
		"url":      {events.ApprovalPreview{URL: strings.Repeat("x", limit)}, events.ApprovalPreview{URL: strings.Repeat("x", limit+1)}},
		"the file": {events.ApprovalPreview{Paths: []string{strings.Repeat("x", limit)}}, events.ApprovalPreview{Paths: []string{strings.Repeat("x", limit+1)}}},
		"files":    {events.ApprovalPreview{Paths: many[:1000]}, events.ApprovalPreview{Paths: many}},
	} {
		a := newAsking(t)
		for key, p := range map[string]events.ApprovalPreview{"largest": c.largest, "larger": c.larger} {
			a.RequestPermission(events.MainConversation, agent.PermissionRequest{Key: key, Call: permission.Call{Tool: "Bash", Kind: permission.KindShell}, Preview: p},
				func(answer agent.PermissionAnswer) { a.answers[key] = answer })
		}
		if r, _ := a.requested(0); r.Preview.Truncated || len(a.answers) != 1 || a.answers["larger"].Outcome != events.OutcomeRejected || !strings.Contains(a.answers["larger"].Message, "larger than the 131072 bytes that a person can be shown") {
			t.Errorf("%s: answers %+v", field, a.answers)
		}
		denied := slices.ContainsFunc(a.journal.Lines(), func(l runner.JournalLine) bool {
			return l.Type == "permission_decided" && data[events.PermissionDecided](t, l).Rule == "too-large-to-show"
		})
		if !denied {
			t.Errorf("%s: the journal has no denial", field)
		}
	}
}

// TestPermit_RefusesAFormTooLargeToStore tests that a request is denied whose questions or schema the executor would refuse:
// nobody could decide it.
func TestPermit_RefusesAFormTooLargeToStore(t *testing.T) {
	t.Parallel()
	a := newAsking(t)
	text := strings.Repeat("x", 600<<10)
	for key, r := range map[string]agent.PermissionRequest{
		"questions": {Kind: events.ApprovalQuestion, Questions: []events.Question{{ID: "q", Question: text}}},
		"schema":    {Kind: events.ApprovalElicitation, Schema: []byte(`{"title":"` + text + `"}`)},
	} {
		r.Key, r.Call = key, permission.Call{Tool: "Bash", Kind: permission.KindQuestion}
		a.RequestPermission(events.MainConversation, r, func(answer agent.PermissionAnswer) { a.answers[key] = answer })
		if got := a.answers[key]; got.Outcome != events.OutcomeRejected || !strings.Contains(got.Message, key) {
			t.Errorf("%s: answered %+v", key, got)
		}
	}
}

// TestPermit_SaysHowLongACutTextIs tests that content which is larger than the request may be is cut with the length of
// the whole.
func TestPermit_SaysHowLongACutTextIs(t *testing.T) {
	t.Parallel()
	a := newAsking(t, func(c *agent.TurnConfig) { c.Redact = redact.New("hunter2hunter2") })
	long := strings.Repeat("+x\n", 100<<10)
	a.RequestPermission(events.MainConversation, agent.PermissionRequest{
		Key: "a", Call: permission.Call{Tool: "Bash", Kind: permission.KindEdit}, Reason: long + "!", Input: []byte(`"` + strings.Repeat("x", 64<<10) + `"`),
		Preview: events.ApprovalPreview{Diff: long, Text: strings.Repeat("x", 128<<10-3) + "hunter2hunter2"},
	}, func(agent.PermissionAnswer) {})
	r, _ := a.requested(0)
	want := []events.CutField{{Field: "diff", Bytes: 300 << 10}, {Field: "text", Bytes: uint32(len(r.Preview.Text) + 7)}, {Field: "reason", Bytes: 300<<10 + 1}, {Field: "input", Bytes: 64<<10 + 2}}
	if p := r.Preview; !p.Truncated || len(p.Diff) > 128<<10 || !strings.HasPrefix(long, p.Diff) || len(p.Cut) != 4 || p.Cut[0] != want[0] || p.Cut[2] != want[2] || p.Cut[3] != want[3] || r.Input != nil {
		t.Errorf("diff of %d bytes, cut %+v", len(p.Diff), p.Cut)
	}
	if strings.Contains(r.Preview.Text, "hunter") {
		t.Error("the text has a part of the secret")
	}
}
