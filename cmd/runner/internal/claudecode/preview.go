package claudecode

import (
	"bytes"
	"encoding/json"
	"io"
	"path/filepath"
	"strings"

	udiff "github.com/aymanbagabas/go-udiff"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// maxDiffed is the size in bytes up to which a file is read for the preview of a change.
const maxDiffed = 64 << 10

// preview returns the fields of a request that a person sees. They are empty if the policy never asks a person.
func (s *session) preview(c checkedCall) agent.PermissionRequest {
	if !s.scope.checked || c.denied != nil {
		return agent.PermissionRequest{}
	}
	r := agent.PermissionRequest{Input: c.input, Editable: true}
	var args map[string]json.RawMessage
	if json.Unmarshal(c.input, &args) != nil {
		return agent.PermissionRequest{}
	}
	for _, p := range c.Paths {
		r.Preview.Paths = append(r.Preview.Paths, p.Path)
	}
	p := &r.Preview
	about := strings.Join(p.Paths, ", ")
	switch {
	case c.Kind == permission.KindShell:
		p.Command, r.Reason = c.Command, text(args, "description")
		about = c.Command
	case c.Tool == askUserQuestion:
		r.Kind, r.Questions, r.Editable = events.ApprovalQuestion, questionsOf(c.input), false
		if len(r.Questions) > 0 {
			about = r.Questions[0].Question
		}
	case c.Tool == exitPlanMode:
		r.Kind, p.Text = events.ApprovalPlan, s.planText(args)
		about = strings.TrimLeft(p.Text, "# \n")
	case c.Tool == "Edit", c.Tool == "MultiEdit", c.Tool == "Write":
		p.Diff, p.Text = s.change(c, args)
	case c.Tool == "NotebookEdit":
		p.Text = text(args, "new_source")
	case len(c.Paths) > 0:
		if p.Text = text(args, "pattern"); p.Text != "" {
			about = p.Text + " in " + about
		}
	case c.Kind == permission.KindNetwork:
		p.URL, p.Text = text(args, "url"), text(args, "prompt")+text(args, "query")
		about = p.URL + text(args, "query")
	case isAgent(c.Tool):
		p.Text, about = text(args, "prompt"), text(args, "description")
	default:
		p.Text = indented(c.input)
	}
	r.Title = display(c.Tool)
	if about = firstLine(about); about != "" {
		r.Title += ": " + about
	}
	return r
}

// firstLine returns the first line of a text that is not empty.
func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// indented returns a JSON value with indentation.
func indented(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, raw, "", "  ") != nil {
		return string(raw)
	}
	return b.String()
}

// replacement is a change of Edit and MultiEdit.
type replacement struct {
	from, to string
	all      bool
}

// replacements returns the changes of a call of Edit or MultiEdit.
func replacements(args map[string]json.RawMessage) []replacement {
	list := []map[string]json.RawMessage{args}
	if raw, ok := args["edits"]; ok && json.Unmarshal(raw, &list) != nil {
		return nil
	}
	var out []replacement
	for _, one := range list {
		out = append(out, replacement{text(one, "old_string"), text(one, "new_string"), string(one["replace_all"]) == "true"})
	}
	return out
}

// change returns the change of a file as a unified diff. For a file that is not in the workspace, or is too large, it
// returns a diff of the replaced texts, or the new content.
func (s *session) change(c checkedCall, args map[string]json.RawMessage) (diff, content string) {
	before, known := "", false
	name := "file"
	if len(c.Paths) == 1 {
		if name = c.Paths[0].Path; !c.Paths[0].Outside {
			before, known = readSmall(s.scope.root, name)
		}
	}
	if c.Tool == "Write" {
		after := text(args, "content")
		if !known || len(after) > maxDiffed {
			return "", after
		}
		return udiff.Unified(name, name, before, after), ""
	}
	after := before
	for _, r := range replacements(args) {
		n := 1
		if r.all {
			n = -1
		}
		if !known || r.from == "" || !strings.Contains(after, r.from) {
			known = false
			break
		}
		after = strings.Replace(after, r.from, r.to, n)
	}
	if known && len(after) <= maxDiffed {
		return udiff.Unified(name, name, before, after), ""
	}
	var b strings.Builder
	for _, r := range replacements(args) {
		if len(r.from) > maxDiffed || len(r.to) > maxDiffed {
			return "", indented(c.input)
		}
		b.WriteString(udiff.Unified(name, name, r.from, r.to))
	}
	return b.String(), ""
}

// readSmall returns the content of a file in the folder root. The bool is false if there is no such file or it is larger than
// maxDiffed.
func readSmall(root, path string) (string, bool) {
	w, err := workspace.Open(root)
	if err != nil {
		return "", false
	}
	defer w.Close()
	f, err := w.Get(path)
	if err != nil {
		return "", false
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxDiffed+1))
	return string(raw), err == nil && len(raw) <= maxDiffed
}

// isPlanFile reports whether a call writes or reads a plan of plan mode.
func (s scope) isPlanFile(c checkedCall) bool {
	return c.Kind == permission.KindBookkeeping && len(c.Paths) == 1 && s.isPlan(c.Paths[0].Path)
}

// planText returns the plan that the agent wants to carry out: from the call, or else from the plan that it wrote last.
func (s *session) planText(args map[string]json.RawMessage) string {
	if plan := text(args, "plan"); plan != "" {
		return plan
	}
	path := s.plan
	if named := text(args, "planFilePath"); named != "" {
		if real, err := resolve(filepath.Clean(named)); err == nil && s.scope.isPlan(real) {
			path = real
		}
	}
	if path == "" {
		return ""
	}
	plan, _ := readSmall(s.scope.plans, filepath.Base(path))
	return plan
}
