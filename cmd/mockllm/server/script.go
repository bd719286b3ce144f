package server

import (
	"regexp"
	"text/template"
	"time"
)

// Script is a loaded and checked script. docs/mockllm.md describes the format.
type Script struct {
	models []string // empty: any model is known
	stream pacing
	rules  []*rule
}

// pacing defines the pieces in which text is streamed, and the pauses between them.
type pacing struct {
	piece int           // bytes a piece holds at most; a rune is never cut
	delay time.Duration // between two pieces
}

// rule is a rule of the script: its conditions, and the replies to requests that meet the conditions.
type rule struct {
	name  string
	match match
	times int  // 0: without limit
	each  bool // times counts per conversation, not per server
	// replies are the steps, split where the client has to act: every reply except the last ends with tool calls.
	replies []reply
}

// reply is the part of a rule that answers one request.
type reply struct {
	steps []step
	calls int // tool calls in it
	// tail marks the empty reply after steps that end with tool calls: the rule no longer applies.
	tail bool
}

// match holds the conditions that a request must meet for a rule to apply. A condition that is nil or empty is not
// checked.
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

// textMatch is a condition that a text meets if it contains a substring or matches a regular expression.
type textMatch struct {
	contains string
	regex    *regexp.Regexp
}

// find reports whether the text matches, and returns the submatches; captures[0] is the whole match.
func (m *textMatch) find(text string) ([]string, bool) {
	if m.regex == nil {
		return []string{m.contains}, containsFold(text, m.contains)
	}
	captures := m.regex.FindStringSubmatch(text)
	return captures, captures != nil
}

// stepKind is the type of a step, such as a text or a tool call.
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

// step is one step of a rule as the script has it; kind determines which fields are set.
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

// callSpec is a tool call in a step of the script.
type callSpec struct {
	name  string
	input any // map[string]any, or *template.Template for a free-text tool
}

// faultSpec is the error in a step of the script.
type faultSpec struct {
	status     int
	kind       string // "" means the API's own type for the status
	retryAfter time.Duration
}
