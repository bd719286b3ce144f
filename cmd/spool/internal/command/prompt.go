package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

// settleTime is the time for which keys are ignored after a prompt went away by itself: they were typed for that prompt, not for the next.
const settleTime = 500 * time.Millisecond

// prompter asks the user to decide approval requests, one after the other, below the output of a session. Only a line that the user types
// for a request decides it: keys that were typed earlier, a closed input and Ctrl-C decide nothing.
type prompter struct {
	app       *app
	renderer  *terminal.Renderer
	client    func() *client.Client
	interrupt func() // called when the user types Ctrl-C, which is not a signal while a prompt is shown

	changed chan struct{} // has an element after queue changed
	mu      sync.Mutex
	queue   []openApproval

	// The fields below are used by run only.
	keys    chan []byte // result of the pending read; nil for the end of the input
	reading bool
	closed  bool // the input has ended
	settled time.Time
	restore func() error // ends the raw mode; nil without it
}

// openApproval is a request that waits for a decision.
type openApproval struct {
	events.ApprovalRequested
	execution string
}

// Errors that end a prompt without a decision.
var (
	errRequestGone = errors.New("the request is not open any more")
	errNoDecision  = errors.New("the user makes no decision")
)

// canPrompt reports whether requests can be decided on the terminal.
func (a *app) canPrompt() bool { return a.InTTY && a.OutTTY && a.Raw != nil }

func newPrompter(a *app, r *terminal.Renderer, cl func() *client.Client, interrupt func()) *prompter {
	return &prompter{app: a, renderer: r, client: cl, interrupt: interrupt, changed: make(chan struct{}, 1), keys: make(chan []byte, 1)}
}

// event adds and removes requests.
func (p *prompter) event(e events.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		p.queue = append(p.queue, openApproval{d, e.ExecutionID})
	case events.ApprovalDecided:
		p.remove(func(o openApproval) bool { return o.ApprovalID == d.ApprovalID })
	case events.ApprovalResolved:
		p.remove(func(o openApproval) bool { return o.ApprovalID == d.ApprovalID })
	case events.ApprovalRetracted:
		p.remove(func(o openApproval) bool { return o.ApprovalID == d.ApprovalID })
	default:
		if !events.IsTerminal(e.Type()) {
			return
		}
		p.remove(func(o openApproval) bool { return o.execution == e.ExecutionID })
	}
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

func (p *prompter) remove(which func(openApproval) bool) {
	p.queue = slices.DeleteFunc(p.queue, which)
}

// first returns the first request of the queue, or nil.
func (p *prompter) first() *openApproval {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return nil
	}
	o := p.queue[0]
	return &o
}

// run asks about the requests of the queue until ctx or the input ends.
func (p *prompter) run(ctx context.Context) {
	for ctx.Err() == nil && !p.closed {
		o := p.first()
		if o == nil {
			select {
			case <-ctx.Done():
			case <-p.changed:
			}
			continue
		}
		if p.isOpen(ctx, o.ApprovalID) {
			p.ask(ctx, *o)
		}
		p.mu.Lock()
		p.remove(func(other openApproval) bool { return other.ApprovalID == o.ApprovalID })
		p.mu.Unlock()
	}
}

// isOpen reports whether a request waits for a decision. The events of a past request arrive one by one.
func (p *prompter) isOpen(ctx context.Context, id string) bool {
	x, err := p.client().Approvals.GetApproval(ctx, &spoolv1.GetApprovalRequest{ApprovalId: id})
	return ctx.Err() == nil && (err != nil || x.Status == "pending")
}

// ask shows a prompt until the request is decided or not open any more, or the user makes no decision.
func (p *prompter) ask(ctx context.Context, o openApproval) {
	if err := p.beginKeys(); err != nil {
		p.renderer.Note("the terminal cannot be read, so that the request must be decided elsewhere: " + err.Error())
		p.closed = true
		return
	}
	defer func() {
		p.renderer.Prompt("", "")
		if err := p.endKeys(); err != nil {
			p.renderer.Note("restore the terminal: " + err.Error())
		}
	}()
	for {
		r, err := p.dialog(ctx, o)
		if err == nil {
			p.renderer.Prompt("", "")
			r.ApprovalId = o.ApprovalID
			_, err = p.client().Approvals.DecideApproval(ctx, r)
		}
		switch {
		case err == nil, ctx.Err() != nil:
			return
		case errors.Is(err, errRequestGone):
			p.settled = time.Now().Add(settleTime)
			return
		case errors.Is(err, errNoDecision):
			p.renderer.Note("the request stays open; decide it with spool approvals, " + o.ApprovalID)
			return
		case client.IsCode(err, "APPROVAL_DECIDED", "APPROVAL_NOT_OPEN", "APPROVAL_NOT_FOUND"):
			p.renderer.Note(err.Error())
			return
		}
		p.renderer.Note("nothing was decided: " + err.Error())
	}
}

// dialog returns the decision that the user makes.
func (p *prompter) dialog(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	switch o.Kind {
	case events.ApprovalQuestion:
		return p.askQuestions(ctx, o)
	case events.ApprovalElicitation:
		return p.askContent(ctx, o)
	}
	label := "[y]es, [n]o, "
	if o.Class != "" {
		label += "[a]ll " + terminal.Line(o.Class) + ", "
	}
	label += "[s]kip, "
	canEdit := o.Editable && len(o.Input) > 0 && o.Kind == events.ApprovalTool
	if canEdit {
		label += "[e]dit, "
	}
	label += "[?] whole request:"
	for {
		line, err := p.readLine(ctx, o.ApprovalID, label, "", false)
		if err != nil {
			return nil, err
		}
		switch answer := strings.ToLower(strings.TrimSpace(line)); {
		case isYes(answer):
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionApprove}, nil
		case answer == "n" || answer == "no":
			return p.reject(ctx, o)
		case (answer == "a" || answer == "all") && o.Class != "":
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionApproveAll}, nil
		case answer == "s" || answer == "skip":
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionSkip}, nil
		case (answer == "e" || answer == "edit") && canEdit:
			if r, err := p.edit(ctx, o); r != nil || err != nil {
				return r, err
			}
		case answer == "?":
			p.renderer.Approval(o.ApprovalRequested)
		}
	}
}

// reject asks for the comment of a rejection.
func (p *prompter) reject(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	comment, err := p.readLine(ctx, o.ApprovalID, "what to tell the agent (empty for nothing):", "", false)
	return &spoolv1.DecideApprovalRequest{Decision: events.DecisionReject, Comment: strings.TrimSpace(comment)}, err
}

// askQuestions returns the answers to the questions of a request.
func (p *prompter) askQuestions(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	answers := map[string][]string{}
	for i := 0; i < len(o.Questions); {
		q := o.Questions[i]
		label := terminal.Line(q.Question) + " (text"
		if len(q.Options) > 0 {
			label = terminal.Line(q.Question) + " (number or text"
		}
		line, other, err := p.answerLine(ctx, o, label, q.Secret)
		if other != nil || err != nil {
			return other, err
		}
		answer, err := parseAnswer(q, line)
		if err != nil {
			p.renderer.Note(err.Error())
			continue
		}
		answers[q.ID] = answer
		i++
	}
	text, err := answersJSON(answers)
	return &spoolv1.DecideApprovalRequest{Decision: events.DecisionAnswer, Answers: text}, err
}

// askContent returns the answer to an MCP server.
func (p *prompter) askContent(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	for {
		line, other, err := p.answerLine(ctx, o, "answer (a JSON object", false)
		if other != nil || err != nil {
			return other, err
		}
		if isJSONObject([]byte(line)) {
			return &spoolv1.DecideApprovalRequest{Decision: events.DecisionAnswer, Content: &spoolv1.Json{Text: line}}, nil
		}
		p.renderer.Note("the answer is not a JSON object")
	}
}

// answerLine returns a line with an answer, or the decision to give none. label has an open parenthesis.
func (p *prompter) answerLine(ctx context.Context, o openApproval, label string, secret bool) (line string, other *spoolv1.DecideApprovalRequest, err error) {
	for {
		line, err := p.readLine(ctx, o.ApprovalID, label+", /skip, /no or ?):", "", secret)
		if err != nil {
			return "", nil, err
		}
		switch strings.TrimSpace(line) {
		case "":
		case "?":
			p.renderer.Approval(o.ApprovalRequested)
		case "/skip":
			return "", &spoolv1.DecideApprovalRequest{Decision: events.DecisionSkip}, nil
		case "/no":
			other, err = p.reject(ctx, o)
			return "", other, err
		default:
			return strings.TrimSpace(line), nil, nil
		}
	}
}

// edit lets the user change the arguments of a call, and asks for a confirmation. It returns nil for no decision.
func (p *prompter) edit(ctx context.Context, o openApproval) (*spoolv1.DecideApprovalRequest, error) {
	changed, err := p.editJSON(ctx, o)
	if err != nil {
		return nil, err
	}
	switch {
	case !isJSONObject(changed):
		p.renderer.Note("the arguments are not a JSON object, so that nothing was changed")
		return nil, nil
	case sameJSON(changed, o.Input):
		p.renderer.Note("the arguments are not changed")
		return nil, nil
	}
	p.renderer.Lines("changed arguments", changed)
	answer, err := p.readLine(ctx, o.ApprovalID, "approve with these arguments? [y/n]:", "", false)
	if err != nil || !isYes(strings.ToLower(strings.TrimSpace(answer))) {
		return nil, err
	}
	return &spoolv1.DecideApprovalRequest{Decision: events.DecisionApprove, Arguments: &spoolv1.Json{Text: string(changed)}}, nil
}

// editJSON returns the arguments of a call as the user has edited them: in an editor if there is one, else as a line.
func (p *prompter) editJSON(ctx context.Context, o openApproval) ([]byte, error) {
	var text bytes.Buffer
	if p.app.Edit == nil {
		if err := json.Compact(&text, o.Input); err != nil {
			return nil, err
		}
		line, err := p.readLine(ctx, o.ApprovalID, "arguments:", text.String(), false)
		return []byte(line), err
	}
	if err := json.Indent(&text, o.Input, "", "  "); err != nil {
		return nil, err
	}
	p.renderer.Suspend()
	defer p.renderer.Resume()
	if err := p.endKeys(); err != nil {
		return nil, err
	}
	changed, err := p.app.Edit(ctx, append(text.Bytes(), '\n'))
	return bytes.TrimSpace(changed), errors.Join(err, p.beginKeys())
}

// beginKeys puts the terminal into raw mode, in which keys are read one by one. It drops what was typed before.
func (p *prompter) beginKeys() (err error) {
	if p.restore, err = p.app.Raw(); err != nil || p.app.DropInput == nil {
		return err
	}
	return p.app.DropInput()
}

// endKeys restores the terminal, if it is in raw mode.
func (p *prompter) endKeys() error {
	if p.restore == nil {
		return nil
	}
	restore := p.restore
	p.restore = nil
	return restore()
}

// isJSONObject reports whether a text is a JSON object.
func isJSONObject(b []byte) bool {
	var o map[string]json.RawMessage
	return json.Unmarshal(b, &o) == nil && o != nil
}

// sameJSON reports whether two JSON texts differ in spaces only.
func sameJSON(a, b []byte) bool {
	var x, y bytes.Buffer
	return json.Compact(&x, a) == nil && json.Compact(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
}

// The keys of a prompt, besides text.
const (
	keyEnd       = 0x04 // Ctrl-D
	keyBackspace = 0x7f
	keyErase     = 0x08
	keyClear     = 0x15 // Ctrl-U
	keyEscape    = 0x1b
)

// readLine shows a prompt and returns the line that the user types. It returns errRequestGone when the request is not open any more,
// errNoDecision for Ctrl-C, Ctrl-D and the end of the input, and the cause of ctx.
func (p *prompter) readLine(ctx context.Context, id, label, text string, secret bool) (string, error) {
	line := []byte(text)
	for {
		shown := string(line)
		if secret {
			shown = strings.Repeat("*", utf8.RuneCount(line))
		}
		p.renderer.Prompt(label, shown)
		p.read()
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-p.changed:
			if o := p.first(); o == nil || o.ApprovalID != id {
				return "", errRequestGone
			}
		case keys := <-p.keys:
			p.reading = false
			if keys == nil {
				p.closed = true
				return "", errNoDecision
			}
			if time.Now().Before(p.settled) {
				continue
			}
			var done bool
			var err error
			if line, done, err = p.typed(line, keys); done || err != nil {
				return strings.ToValidUTF8(string(line), "\uFFFD"), err
			}
		}
	}
}

// read begins to read keys, unless a read is pending. Nothing is read between prompts, so that an editor, and the shell after this program,
// get what is typed for them. The goroutine ends with the read, or with the process.
func (p *prompter) read() {
	if p.reading || p.closed {
		return
	}
	p.reading = true
	go func() {
		b := make([]byte, 4096)
		n, err := p.app.In.Read(b)
		if err != nil || n == 0 {
			p.keys <- nil
			return
		}
		p.keys <- b[:n]
	}()
}

// typed applies keys to a line. done reports that the line is complete; keys after its end are dropped.
func (p *prompter) typed(line, keys []byte) (_ []byte, done bool, err error) {
	for _, key := range keys {
		switch {
		case key == '\r' || key == '\n':
			return line, true, nil
		case key == keyCancel:
			p.interrupt()
			return nil, false, errNoDecision
		case key == keyEnd && len(line) == 0:
			return nil, false, errNoDecision
		case key == keyBackspace || key == keyErase:
			_, size := utf8.DecodeLastRune(line)
			line = line[:len(line)-size]
		case key == keyClear:
			line = line[:0]
		case key == keyEscape:
			return line, false, nil // a key such as an arrow, with the rest of its sequence
		case key == '\t' || key >= 0x20:
			line = append(line, key)
		}
	}
	return line, false, nil
}
