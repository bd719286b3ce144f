package agent

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/pkg/visible"
)

const (
	// maxShownText is the maximum size in bytes of each text of an approval request, and of its paths together. Linux
	// accepts no longer argument of a program, so the command of a shell fits, unless it has many escapes.
	maxShownText = 128 << 10
	// maxShownLine is the maximum size in bytes of a title and of a class.
	maxShownLine = 1 << 10
	// maxApprovalInput is the maximum size of the arguments that an approval request contains, in bytes.
	maxApprovalInput = 64 << 10
	// maxApprovalForm is the maximum size in bytes of the questions of an approval request, and of its schema. The
	// executor refuses a request with more than twice as much.
	maxApprovalForm = 512 << 10
)

// ruleTooLargeToShow is the rule that denies a call because a person could not see all of what it does.
const ruleTooLargeToShow = "too-large-to-show"

// newApprovalRequest returns the event that asks a person about a request, without its id. If a field that says what the
// call does, or what the person answers, is larger than a person can be shown, it returns a denial instead.
func (t *Turn) newApprovalRequest(p *pendingRequest) (e events.ApprovalRequested, denial *permission.Decision) {
	r := p.request
	e = events.ApprovalRequested{
		Kind: r.Kind, ToolName: t.shownLine(r.Call.Tool), ToolUseID: r.ToolUseID, Rule: p.decision.Rule,
		Title: truncate.Text(t.shownLine(r.Title), maxShownLine), Editable: r.Editable, Class: t.shownClass(p.class),
		Questions: r.Questions, Schema: r.Schema, TimeoutMs: t.cfg.Policy.TimeoutMs(),
	}
	if e.Kind == "" {
		e.Kind = events.ApprovalTool
	}
	e.Preview.Cut = slices.Clone(r.Preview.Cut)
	v, tooLarge, limit := &e.Preview, "", maxShownText
	whole := func(name string, show func(string) string, texts ...string) []string {
		shown, fits := wholeTexts(show, texts)
		if !fits {
			tooLarge = name
		}
		return shown
	}
	v.Command = whole("command", t.shownText, r.Preview.Command)[0]
	v.Cwd, v.URL = whole("working directory", t.shownLine, r.Preview.Cwd)[0], whole("URL", t.shownLine, r.Preview.URL)[0]
	v.Paths, v.Hosts = whole("list of files", t.shownLine, t.shownPaths(r)...), whole("list of hosts", t.shownLine, r.Call.Hosts...)
	if len(r.Schema) > maxApprovalForm {
		tooLarge, limit = "schema", maxApprovalForm
	}
	if questions, err := json.Marshal(r.Questions); err != nil || len(questions) > maxApprovalForm {
		tooLarge, limit = "list of questions", maxApprovalForm
	}
	if tooLarge != "" {
		return e, &permission.Decision{Action: events.PermissionDeny, Rule: ruleTooLargeToShow, Reason: fmt.Sprintf(
			"A person would have to approve this call, and its %s is larger than the %d bytes that a person can be shown. It was denied. Make it smaller, for example with a script in a file.", tooLarge, limit)}
	}
	v.Diff, v.Text, e.Reason = t.cutText("diff", r.Preview.Diff, v), t.cutText("text", r.Preview.Text, v), t.cutText("reason", r.Reason, v)
	switch {
	case len(r.Input) > maxApprovalInput:
		markCut("input", len(r.Input), v)
	case json.Valid(r.Input): // otherwise the line could not be encoded, and nobody could decide
		e.Input = r.Input
	}
	if !json.Valid(e.Schema) {
		e.Schema = nil
	}
	return e, nil
}

// FirstLine returns the first line of a text that is not empty, for a title. It marks a text that has more lines.
func FirstLine(s string) string {
	line, more, _ := strings.Cut(strings.TrimSpace(s), "\n")
	if more != "" {
		line = strings.TrimSpace(line) + " …"
	}
	return line
}

// shownPaths returns the files that a person sees: those that the call names, and those that the policy checks if they
// are others, such as the file to which a link leads.
func (t *Turn) shownPaths(r PermissionRequest) []string {
	paths := slices.Clone(r.Preview.Paths)
	for _, c := range r.Call.Paths {
		if !slices.ContainsFunc(paths, func(p string) bool { return p == c.Path || t.isWorkspacePath(p, c.Path) }) {
			paths = append(paths, c.Path)
		}
	}
	return paths
}

// isWorkspacePath reports whether path names the file at rel, which is relative to the workspace, without a link.
func (t *Turn) isWorkspacePath(path, rel string) bool {
	real, err := filepath.EvalSymlinks(t.cfg.Workspace)
	if err != nil || filepath.IsAbs(rel) {
		return false
	}
	for _, root := range []string{t.cfg.Workspace, real} { // some agents name files by the one, and some by the other
		if path == filepath.Join(root, rel) {
			return true
		}
	}
	return filepath.ToSlash(filepath.Clean(path)) == rel
}

// wholeTexts returns texts in the form that show returns, and reports whether they have at most maxShownText bytes
// together. It returns empty texts in place of those that do not fit.
func wholeTexts(show func(string) string, texts []string) (shown []string, fit bool) {
	size := 0
	for _, s := range texts {
		if size += len(s); size <= maxShownText {
			s = show(s)
			size += len(s) - len(texts[len(shown)])
		}
		if size > maxShownText {
			s = ""
		}
		shown = append(shown, s)
	}
	return shown, size <= maxShownText
}

// cutText returns a text as shownText does. If it is longer than maxShownText, cutText cuts it, and marks the field in v
// as cut. v may have the length of a text that the adapter has cut.
func (t *Turn) cutText(field, s string, v *events.ApprovalPreview) string {
	s = t.cfg.Redact.RedactString(s)
	shown := visible.Text(truncate.Prefix(s, maxShownText))
	if len(s) > maxShownText || len(shown) > maxShownText {
		markCut(field, len(s), v)
	}
	return truncate.Prefix(shown, maxShownText)
}

// markCut marks a field of a request, the whole of which has the given length in bytes, as cut.
func markCut(field string, length int, v *events.ApprovalPreview) {
	v.Truncated = true
	if slices.ContainsFunc(v.Cut, func(c events.CutField) bool { return c.Field == field }) {
		return
	}
	v.Cut = append(v.Cut, events.CutField{Field: field, Bytes: uint32(min(length, math.MaxUint32))}) //nolint:gosec // limited
}

// shownText returns a text in the form in which a person sees it: without secrets, and with the characters escaped that
// a reader would not see.
func (t *Turn) shownText(s string) string { return visible.Text(t.cfg.Redact.RedactString(s)) }

// shownLine is like shownText, and also escapes line feeds and tabs.
func (t *Turn) shownLine(s string) string { return visible.Line(t.cfg.Redact.RedactString(s)) }

// shownClass returns a class of calls in the form in which a person sees it. It returns "", with which a person cannot
// approve the class, for a class that is too long to be shown whole.
func (t *Turn) shownClass(class string) string {
	if class = t.shownLine(class); len(class) > maxShownLine {
		return ""
	}
	return class
}
