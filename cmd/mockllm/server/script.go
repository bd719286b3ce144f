package server

import (
	"regexp"
	"text/template"
	"time"
)

// Script is a loaded, checked script. Load makes one; docs/mockllm.md
// describes the format.
type Script struct {
	models []string // empty: any model is known
	stream pacing
	rules  []*rule
}

// pacing says how text is cut up when it is streamed.
type pacing struct {
	piece int           // bytes a piece holds at most; a rune is never cut
	delay time.Duration // between two pieces
}

type rule struct {
	name  string
	match match
	times int  // 0: without limit
	each  bool // times counts per conversation, not per server
	// replies are the steps, cut where the client has to act: every reply but
	// the last ends in tool calls.
	replies []reply
}

// reply answers one request.
type reply struct {
	steps []step
	calls int // tool calls in it
	// tail marks what remains when a rule's steps end in tool calls: nothing
	// is left to say, and the rule no longer applies.
	tail bool
}

// match holds a rule's conditions; what is nil or empty is not asked.
type match struct {
	user       *textMatch
	toolResult *textMatch
	system     *textMatch
	model      *textMatch
	apis       []API
	tools      []string // all must be offered
	noTools    bool     // none may be offered
	minTurns   int
	maxTurns   int
	stream     *bool
}

// textMatch is a substring or a regular expression.
type textMatch struct {
	contains string
	regex    *regexp.Regexp
}

// find reports a match and its captures; captures[0] is the whole match.
func (m *textMatch) find(text string) ([]string, bool) {
	if m.regex == nil {
		return []string{m.contains}, containsFold(text, m.contains)
	}
	captures := m.regex.FindStringSubmatch(text)
	return captures, captures != nil
}

type stepKind int

const (
	stepText stepKind = iota
	stepThinking
	stepTools
	stepDelay
	stepError
	stepBreak
	stepEndless
	stepStop
)

type step struct {
	kind   stepKind
	line   int
	text   *template.Template // text, thinking, endless, error message
	pacing pacing
	calls  []callSpec
	delay  time.Duration
	fault  faultSpec
	stop   string
}

type callSpec struct {
	name  string
	input any // map[string]any, or *template.Template for a free-text tool
}

type faultSpec struct {
	status     int
	kind       string // "" means the API's own type for the status
	retryAfter time.Duration
}
