package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// ignoredKeysTime is the time for which typed keys are ignored after a prompt has been removed because its request was
// decided elsewhere. The user typed these keys for that prompt, not for the next one.
const ignoredKeysTime = 500 * time.Millisecond

// approvalPrompter asks the user to decide approval requests, one after the other, below the output of a session. Only
// a line that the user types for a request decides it: keys that were typed earlier, a closed input and Ctrl-C decide
// nothing.
type approvalPrompter struct {
	app       *app
	renderer  *terminal.Renderer
	client    func() *client.Client
	interrupt func() // called when the user types Ctrl-C, which is not a signal while a prompt is shown

	changed chan struct{} // has an element after queue changed
	mu      sync.Mutex
	queue   []openApproval

	// The fields below are used by run only.
	keys    chan typedKeys // result of the pending read
	reading bool
	closed  bool         // the input has ended
	valid   time.Time    // keys that were typed before decide nothing
	restore func() error // ends the raw mode; nil without it
}

// typedKeys is the result of a read of the terminal.
type typedKeys struct {
	keys []byte // nil for the end of the input
	at   time.Time
}

// openApproval is an approval request that waits for a decision.
type openApproval struct {
	events.ApprovalRequested
	execution string
}

// Errors that end a prompt without a decision.
var (
	errRequestGone = errors.New("the request is not open any more")
	errNoDecision  = errors.New("the user makes no decision")
)

// canPrompt reports whether the user can decide approval requests on the terminal.
func (a *app) canPrompt() bool { return a.InTTY && a.OutTTY && a.Raw != nil }

func newApprovalPrompter(a *app, r *terminal.Renderer, cl func() *client.Client, interrupt func()) *approvalPrompter {
	return &approvalPrompter{app: a, renderer: r, client: cl, interrupt: interrupt, changed: make(chan struct{}, 1), keys: make(chan typedKeys, 1)}
}

// updateQueue adds a request to the queue, or removes requests that are decided or over, as the event e states.
func (p *approvalPrompter) updateQueue(e events.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		p.queue = append(p.queue, openApproval{d, e.ExecutionID})
	case events.ApprovalDecided:
		p.removeRequests(func(o openApproval) bool { return o.ApprovalID == d.ApprovalID })
	case events.ApprovalResolved:
		p.removeRequests(func(o openApproval) bool { return o.ApprovalID == d.ApprovalID })
	case events.ApprovalRetracted:
		p.removeRequests(func(o openApproval) bool { return o.ApprovalID == d.ApprovalID })
	default:
		if !events.IsTerminal(e.Type()) {
			return
		}
		p.removeRequests(func(o openApproval) bool { return o.execution == e.ExecutionID })
	}
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// removeRequests removes the requests from the queue for which which returns true. The caller must hold mu.
func (p *approvalPrompter) removeRequests(which func(openApproval) bool) {
	p.queue = slices.DeleteFunc(p.queue, which)
}

// firstRequest returns the first request in the queue, or nil if the queue is empty.
func (p *approvalPrompter) firstRequest() *openApproval {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return nil
	}
	o := p.queue[0]
	return &o
}

// run asks the user about the requests in the queue until ctx or the input ends.
func (p *approvalPrompter) run(ctx context.Context) {
	for ctx.Err() == nil && !p.closed {
		o := p.firstRequest()
		if o == nil {
			select {
			case <-ctx.Done():
			case <-p.changed:
			}
			continue
		}
		if p.isRequestOpen(ctx, o.ApprovalID) {
			p.promptForDecision(ctx, *o)
		}
		p.mu.Lock()
		p.removeRequests(func(other openApproval) bool { return other.ApprovalID == o.ApprovalID })
		p.mu.Unlock()
	}
}

// isRequestOpen asks the server whether an approval request still waits for a decision. When a past session is shown,
// the event of a decided request arrives before the event of its decision.
func (p *approvalPrompter) isRequestOpen(ctx context.Context, id string) bool {
	x, err := p.client().Approvals.GetApproval(ctx, &spoolv1.GetApprovalRequest{ApprovalId: id})
	return ctx.Err() == nil && (err != nil || x.Status == "pending")
}

// promptForDecision shows prompts until the request is decided or no longer open, or the user declines to decide.
func (p *approvalPrompter) promptForDecision(ctx context.Context, o openApproval) {
	if err := p.enterKeyMode(); err != nil {
		p.renderer.ShowNote("the terminal cannot be read, so that the request must be decided elsewhere: " + err.Error())
		p.closed = true
		return
	}
	if now := time.Now(); p.valid.Before(now) { // a read that is still pending may have received keys
		p.valid = now
	}
	defer func() {
		p.renderer.ShowPrompt(terminal.PromptLabel{}, "")
		if err := p.leaveKeyMode(); err != nil {
			p.renderer.ShowNote("restore the terminal: " + err.Error())
		}
	}()
	for {
		r, err := p.askDecision(ctx, o)
		if err == nil {
			p.renderer.ShowPrompt(terminal.PromptLabel{}, "")
			r.ApprovalId = o.ApprovalID
			_, err = p.client().Approvals.DecideApproval(ctx, r)
		}
		switch {
		case err == nil, ctx.Err() != nil:
			return
		case errors.Is(err, errRequestGone):
			p.valid = time.Now().Add(ignoredKeysTime)
			return
		case errors.Is(err, errNoDecision):
			p.renderer.ShowNote("the request stays open; decide it with spool approvals, " + o.ApprovalID)
			return
		case client.IsCode(err, "APPROVAL_DECIDED", "APPROVAL_NOT_OPEN", "APPROVAL_NOT_FOUND"):
			p.renderer.ShowNote(err.Error())
			return
		}
		p.renderer.ShowNote("nothing was decided: " + err.Error())
	}
}

// askDecision asks the user about an approval request, and returns the decision to send.
func (p *approvalPrompter) askDecision(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	switch {
	case o.Kind == events.ApprovalQuestion && len(o.Questions) > 0:
		return p.askQuestions(ctx, o)
	case o.Kind == events.ApprovalElicitation:
		return p.askContent(ctx, o)
	}
	request := o.ApprovalRequested
	request.Class = "" // each page has it
	rows := p.renderer.BeginPrompt(request)
	left := p.renderer.WritePage(rows, o.Class)
	canEdit := o.Editable && len(o.Input) > 0 && o.Kind == events.ApprovalTool
	for {
		line, err := p.readLine(ctx, o.ApprovalID, decisionLabel(o, canEdit, len(left) > 0), "", false)
		if err != nil {
			return nil, err
		}
		switch answer := strings.ToLower(strings.TrimSpace(line)); {
		case isYes(answer):
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionApprove}, nil
		case answer == "n" || answer == "no":
			return p.askRejection(ctx, o)
		case (answer == "a" || answer == "all") && o.Class != "":
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionApproveAll}, nil
		case answer == "s" || answer == "skip":
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionSkip}, nil
		case (answer == "e" || answer == "edit") && canEdit:
			if r, err := p.askEditedArguments(ctx, o); r != nil || err != nil {
				return r, err
			}
		case (answer == "m" || answer == "more") && len(left) > 0:
			left = p.renderer.WritePage(left, o.Class)
		case answer == "?":
			p.renderer.WriteWhole(rows, o.ApprovalRequested)
			left = nil
		}
	}
}

// decisionLabel returns the label of the prompt that asks for the decision on a call, with all choices.
func decisionLabel(o openApproval, canEdit, more bool) terminal.PromptLabel {
	var full, short []string
	for _, c := range []struct {
		offered    bool
		key, label string
	}{
		{true, "y", "[y]es"}, {true, "n", "[n]o"}, {o.Class != "", "a", "[a]ll"}, {true, "s", "[s]kip"}, {canEdit, "e", "[e]dit"}, {more, "m", "[m]ore"}, {true, "?", "[?] whole request"},
	} {
		if c.offered {
			full, short = append(full, c.label), append(short, c.key)
		}
	}
	return terminal.PromptLabel{Full: strings.Join(full, ", ") + ":", Short: "[" + strings.Join(short, "/") + "]:"}
}

// askRejection asks the user for a comment, and returns the decision that rejects the call.
func (p *approvalPrompter) askRejection(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	comment, err := p.readLine(ctx, o.ApprovalID, terminal.PromptLabel{Full: "what to tell the agent (empty for nothing):", Short: "comment:"}, "", false)
	return &spoolv1.DecideApprovalRequest{Decision: events.DecisionReject, Comment: strings.TrimSpace(comment)}, err
}

// askQuestions asks the user the questions of an approval request, and returns the decision with the answers.
func (p *approvalPrompter) askQuestions(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	answers := map[string][]string{}
	rows := p.renderer.BeginPrompt(o.ApprovalRequested)
	left := p.renderer.WritePage(rows, "")
	for i := 0; i < len(o.Questions); {
		q := o.Questions[i]
		label := fmt.Sprintf("answer %d (text", i+1)
		if len(q.Options) > 0 {
			label = fmt.Sprintf("answer %d (number or text", i+1)
		}
		line, other, err := p.askAnswer(ctx, o, label, q.Secret, rows, &left)
		if other != nil || err != nil {
			return other, err
		}
		answer, err := parseAnswer(q, line)
		if err != nil {
			p.renderer.ShowNote(err.Error())
			continue
		}
		answers[q.ID] = answer
		i++
	}
	text, err := encodeAnswers(answers)
	return &spoolv1.DecideApprovalRequest{Decision: events.DecisionAnswer, Answers: text}, err
}

// askContent asks the user for the content that an MCP server has requested, and returns the decision with it.
func (p *approvalPrompter) askContent(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	rows := p.renderer.BeginPrompt(o.ApprovalRequested)
	left := p.renderer.WritePage(rows, "")
	for {
		line, other, err := p.askAnswer(ctx, o, "answer (a JSON object", false, rows, &left)
		if other != nil || err != nil {
			return other, err
		}
		if isJSONObject([]byte(line)) {
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionAnswer, Content: &spoolv1.Json{Text: line}}, nil
		}
		p.renderer.ShowNote("the answer is not a JSON object")
	}
}

// askAnswer returns a line that the user types as an answer, or, in other, the decision to give no answer. The label
// has an open parenthesis, to which askAnswer adds the keys. rows are those of the request, of which left were not shown.
func (p *approvalPrompter) askAnswer(ctx context.Context, o openApproval, label string, secret bool, rows []string, left *[]string) (line string, other *spoolv1.DecideApprovalRequest, err error) {
	for {
		keys := terminal.PromptLabel{Full: label + ", /skip, /no or ?):", Short: "/skip /no ?:"}
		if len(*left) > 0 {
			keys = terminal.PromptLabel{Full: label + ", /more, /skip, /no or ?):", Short: "/more /skip /no ?:"}
		}
		line, err := p.readLine(ctx, o.ApprovalID, keys, "", secret)
		if err != nil {
			return "", nil, err
		}
		switch strings.TrimSpace(line) {
		case "":
		case "?":
			p.renderer.WriteWhole(rows, o.ApprovalRequested)
			*left = nil
		case "/more":
			*left = p.renderer.WritePage(*left, "")
		case "/skip":
			return "", &spoolv1.DecideApprovalRequest{Decision: events.DecisionSkip}, nil
		case "/no":
			other, err = p.askRejection(ctx, o)
			return "", other, err
		default:
			return strings.TrimSpace(line), nil, nil
		}
	}
}

// askEditedArguments lets the user edit the arguments of a call and confirm them, and returns the decision. It returns
// nil if the user confirms nothing.
func (p *approvalPrompter) askEditedArguments(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	changed, err := p.readEditedArguments(ctx, o)
	if err != nil {
		return nil, err
	}
	switch {
	case !isJSONObject(changed):
		p.renderer.ShowNote("the arguments are not a JSON object, so that nothing was changed")
		return nil, nil
	case sameJSON(changed, o.Input):
		p.renderer.ShowNote("the arguments are not changed")
		return nil, nil
	}
	p.renderer.WriteField("changed arguments:", string(changed))
	answer, err := p.readLine(ctx, o.ApprovalID, terminal.PromptLabel{Full: "approve with these arguments? [y/n]:", Short: "[y/n]:"}, "", false)
	if err != nil || !isYes(strings.ToLower(strings.TrimSpace(answer))) {
		return nil, err
	}
	return &spoolv1.DecideApprovalRequest{Decision: events.DecisionApprove, Arguments: &spoolv1.Json{Text: string(changed)}}, nil
}

// readEditedArguments returns the arguments of a call as the user has edited them, in the user's editor or else on one
// line.
func (p *approvalPrompter) readEditedArguments(ctx context.Context, o openApproval) ([]byte, error) {
	var text bytes.Buffer
	if p.app.Edit == nil {
		if err := json.Compact(&text, o.Input); err != nil {
			return nil, err
		}
		line, err := p.readLine(ctx, o.ApprovalID, terminal.PromptLabel{Full: "arguments:", Short: "arguments:"}, text.String(), false)
		return []byte(line), err
	}
	if err := json.Indent(&text, o.Input, "", "  "); err != nil {
		return nil, err
	}
	p.renderer.Suspend()
	defer p.renderer.Resume()
	if err := p.leaveKeyMode(); err != nil {
		return nil, err
	}
	changed, err := p.app.Edit(ctx, append(text.Bytes(), '\n'))
	return bytes.TrimSpace(changed), errors.Join(err, p.enterKeyMode())
}

// enterKeyMode puts the terminal into raw mode, in which single keys are read, and drops what was typed before.
func (p *approvalPrompter) enterKeyMode() (err error) {
	if p.restore, err = p.app.Raw(); err != nil || p.app.DropInput == nil {
		return err
	}
	return p.app.DropInput()
}

// leaveKeyMode restores the terminal if it is in raw mode.
func (p *approvalPrompter) leaveKeyMode() error {
	if p.restore == nil {
		return nil
	}
	restore := p.restore
	p.restore = nil
	return restore()
}

// isJSONObject reports whether b is a JSON object.
func isJSONObject(b []byte) bool {
	var o map[string]json.RawMessage
	return json.Unmarshal(b, &o) == nil && o != nil
}

// sameJSON reports whether two JSON texts are equal except for white space.
func sameJSON(a, b []byte) bool {
	var x, y bytes.Buffer
	return json.Compact(&x, a) == nil && json.Compact(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
}

// The keys of a prompt, besides text.
const (
	keyEndOfInput = 0x04 // Ctrl-D
	keyBackspace  = 0x7f
	keyCtrlH      = 0x08
	keyClearLine  = 0x15 // Ctrl-U
	keyEscape     = 0x1b
)

// readLine shows a prompt and returns the line that the user types. It returns errRequestGone when the request is no
// longer open, errNoDecision for Ctrl-C, Ctrl-D and the end of the input, and the cause of ctx when ctx ends.
func (p *approvalPrompter) readLine(ctx context.Context, id string, label terminal.PromptLabel, text string, secret bool) (string, error) {
	line := []byte(text)
	for {
		shown := string(line)
		if secret {
			shown = strings.Repeat("*", utf8.RuneCount(line))
		}
		p.renderer.ShowPrompt(label, shown)
		p.startReading()
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-p.changed:
			if o := p.firstRequest(); o == nil || o.ApprovalID != id {
				return "", errRequestGone
			}
		case typed := <-p.keys:
			p.reading = false
			if typed.keys == nil {
				p.closed = true
				return "", errNoDecision
			}
			if typed.at.Before(p.valid) {
				continue
			}
			var done bool
			var err error
			if line, done, err = p.applyKeys(line, typed.keys); done || err != nil {
				return strings.ToValidUTF8(string(line), "\uFFFD"), err
			}
		}
	}
}

// startReading starts a goroutine that reads keys once, unless one is already reading. No read begins between prompts,
// so that an editor, and the shell after this program, receive what is typed for them. The read of a prompt that goes
// away stays pending until something is typed. The goroutine ends with the read, or with the process.
func (p *approvalPrompter) startReading() {
	if p.reading || p.closed {
		return
	}
	p.reading = true
	go func() {
		b := make([]byte, 4096)
		n, err := p.app.In.Read(b)
		if err != nil || n == 0 {
			b, n = nil, 0
		}
		p.keys <- typedKeys{b[:n], time.Now()}
	}()
}

// applyKeys applies typed keys to a line and returns the new line. done reports whether the line is complete; keys
// after its end are dropped.
func (p *approvalPrompter) applyKeys(line, keys []byte) (_ []byte, done bool, err error) {
	for _, key := range keys {
		switch {
		case key == '\r' || key == '\n':
			return line, true, nil
		case key == keyCtrlC:
			p.interrupt()
			return nil, false, errNoDecision
		case key == keyEndOfInput && len(line) == 0:
			return nil, false, errNoDecision
		case key == keyBackspace || key == keyCtrlH:
			_, size := utf8.DecodeLastRune(line)
			line = line[:len(line)-size]
		case key == keyClearLine:
			line = line[:0]
		case key == keyEscape:
			return line, false, nil // a key such as an arrow, with the rest of its sequence
		case key == '\t' || key >= 0x20:
			line = append(line, key)
		}
	}
	return line, false, nil
}
