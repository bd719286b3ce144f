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
	"github.com/spoolhq/spool/pkg/visible"
)

const (
	// maxPreviewedFile is the maximum size in bytes of a file that is read for the preview of a change.
	maxPreviewedFile = 64 << 10
	// maxPlanFile is the maximum size in bytes of a plan file that is read. A person is shown less of a larger plan, with
	// its length.
	maxPlanFile = 4 << 20
)

// callPreview returns those fields of the permission request for a call that a person sees. Only Input is set if the
// policy never asks a person.
func (s *session) callPreview(c callToDecide) agent.PermissionRequest {
	r := agent.PermissionRequest{Input: c.input}
	var args map[string]json.RawMessage
	if !s.scope.checked || c.denied != nil || json.Unmarshal(c.input, &args) != nil {
		return r
	}
	r.Editable = true
	for _, p := range c.Paths {
		r.Preview.Paths = append(r.Preview.Paths, p.Path)
	}
	p := &r.Preview
	about := strings.Join(p.Paths, ", ")
	switch {
	case c.Kind == permission.KindShell:
		p.Command, r.Reason = c.Command, textArgument(args, "description")
		about = c.Command
	case c.Tool == askUserQuestion:
		r.Kind, r.Questions, r.Editable = events.ApprovalQuestion, parseQuestions(c.input), false
		if len(r.Questions) > 0 {
			about = r.Questions[0].Question
		}
	case c.Tool == exitPlanMode:
		r.Kind, p.Text = events.ApprovalPlan, s.planText(args)
		about = strings.TrimLeft(p.Text, "# \n")
	case c.Tool == "Edit", c.Tool == "MultiEdit", c.Tool == "Write":
		p.Diff, p.Text = s.changePreview(c, args)
	case c.Tool == "NotebookEdit": // it may also delete a cell
		p.Text = indentJSON(c.input)
	case len(c.Paths) > 0:
		if p.Text = textArgument(args, "pattern"); p.Text != "" {
			about = p.Text + " in " + about
		}
	case c.Kind == permission.KindNetwork:
		p.URL, p.Text = textArgument(args, "url"), textArgument(args, "prompt")+textArgument(args, "query")
		about = p.URL + textArgument(args, "query")
	case isSubagentTool(c.Tool):
		p.Text, r.Reason = textArgument(args, "prompt"), textArgument(args, "description")
		about = p.Text
	default:
		p.Text = indentJSON(c.input)
	}
	r.Title = displayName(c.Tool)
	if about = agent.FirstLine(about); about != "" {
		r.Title += ": " + about
	}
	return r
}

// indentJSON returns a JSON value with indentation.
func indentJSON(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, raw, "", "  ") != nil {
		return string(raw)
	}
	return b.String()
}

// textReplacement is one replacement of a text in a call of the tool Edit or MultiEdit.
type textReplacement struct {
	from, to string
	all      bool
}

// textReplacements returns the replacements in the arguments of a call of Edit or MultiEdit.
func textReplacements(args map[string]json.RawMessage) []textReplacement {
	list := []map[string]json.RawMessage{args}
	if raw, ok := args["edits"]; ok && json.Unmarshal(raw, &list) != nil {
		return nil
	}
	var out []textReplacement
	for _, one := range list {
		out = append(out, textReplacement{textArgument(one, "old_string"), textArgument(one, "new_string"), string(one["replace_all"]) == "true"})
	}
	return out
}

// changePreview returns a preview of the change of a file: a unified diff, or for a file that is not in the workspace
// or is too large, a diff of the replaced texts, the new content, or the arguments.
func (s *session) changePreview(c callToDecide, args map[string]json.RawMessage) (diff, content string) {
	before, known := "", false
	name := "file"
	if len(c.Paths) == 1 {
		if name = c.Paths[0].Path; !c.Paths[0].Outside {
			before, known = readSmallFile(s.scope.root, name, maxPreviewedFile)
		}
		name = visible.Line(name)
	}
	if c.Tool == "Write" {
		after := textArgument(args, "content")
		if !known || len(after) > maxPreviewedFile {
			return "", after
		}
		return udiff.Unified(name, name, before, after), ""
	}
	after := before
	for _, r := range textReplacements(args) {
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
	if known && len(after) <= maxPreviewedFile {
		return udiff.Unified(name, name, before, after), ""
	}
	var b strings.Builder
	for _, r := range textReplacements(args) {
		if r.all || len(r.from) > maxPreviewedFile || len(r.to) > maxPreviewedFile {
			return "", indentJSON(c.input)
		}
		b.WriteString(udiff.Unified(name, name, r.from, r.to))
	}
	return b.String(), ""
}

// readSmallFile returns the content of the file path in the folder root. The bool is false if there is no such file or
// it is larger than limit bytes.
func readSmallFile(root, path string, limit int) (string, bool) {
	w, err := workspace.Open(root)
	if err != nil {
		return "", false
	}
	defer w.Close()
	f, err := w.OpenFile(path)
	if err != nil {
		return "", false
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, int64(limit)+1))
	return string(raw), err == nil && len(raw) <= limit
}

// isPlanCall reports whether a call writes or reads a plan file of plan mode.
func (s policyScope) isPlanCall(c callToDecide) bool {
	return c.Kind == permission.KindBookkeeping && len(c.Paths) == 1 && s.isPlanPath(c.Paths[0].Path)
}

// planText returns the plan that the agent wants a person to approve: from the arguments of the call, or else from the
// plan file that the agent wrote last.
func (s *session) planText(args map[string]json.RawMessage) string {
	if plan := textArgument(args, "plan"); plan != "" {
		return plan
	}
	path := s.plan
	if named := textArgument(args, "planFilePath"); named != "" {
		if real, err := resolveLinks(filepath.Clean(named)); err == nil && s.scope.isPlanPath(real) {
			path = real
		}
	}
	if path == "" {
		return ""
	}
	plan, _ := readSmallFile(s.scope.plans, filepath.Base(path), maxPlanFile)
	return plan
}
