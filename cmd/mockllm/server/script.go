package server

import (
	"regexp"
	"text/template"
	"time"
)

// Script is a parsed and validated script, which defines the answers of the server. docs/mockllm.md describes the
// format.
type Script struct {
	models []string // empty: any model is known
	stream textPacing
	rules  []*scriptRule
}

// textPacing is the size of the pieces in which text is streamed, and the pause between two pieces.
type textPacing struct {
	piece int           // maximum number of bytes of a piece; a rune is never cut
	delay time.Duration // pause between two pieces
}

// scriptRule is a rule of the script: its conditions, and the replies to requests that meet the conditions.
type scriptRule struct {
	name  string
	match ruleConditions
	times int  // 0: without limit
	each  bool // times counts per conversation, not per server
	// replies are the steps, split where the client has to act: every reply except the last ends with tool calls.
	replies []ruleReply
}

// ruleReply holds the steps of a rule that answer one request.
type ruleReply struct {
	steps []scriptStep
	calls int // number of tool calls in the reply
	// tail marks the empty reply after steps that end with tool calls: the rule no longer applies.
	tail bool
}

// ruleConditions holds the conditions that a request must meet for a rule to apply. A condition that is nil or empty is
// not checked.
type ruleConditions struct {
	user       *textCondition
	toolResult *textCondition
	system     *textCondition
	model      *textCondition
	apis       []API
	tools      []string // all must be offered
	noTools    bool     // none may be offered
	minTurns   int
	maxTurns   int
	stream     *bool
}

// textCondition is a condition that a text meets if it contains a substring or matches a regular expression.
type textCondition struct {
	contains string
	regex    *regexp.Regexp
}

// matchText reports whether the text meets the condition, and returns the submatches of its regular expression;
// captures[0] is the whole match.
func (m *textCondition) matchText(text string) ([]string, bool) {
	if m.regex == nil {
		return []string{m.contains}, containsFold(text, m.contains)
	}
	captures := m.regex.FindStringSubmatch(text)
	return captures, captures != nil
}

// scriptStepKind is the type of a step, such as a text or a tool call.
type scriptStepKind int

const (
	stepText scriptStepKind = iota
	stepThinking
	stepToolCalls
	stepDelay
	stepError
	stepCutConnection
	stepEndlessText
	stepStopReason
)

// scriptStep is one step of a rule, before its templates are executed. kind determines which of the other fields are
// set.
type scriptStep struct {
	kind   scriptStepKind
	line   int
	text   *template.Template // text, thinking, endless, error message
	pacing textPacing
	calls  []toolCallSpec
	delay  time.Duration
	fault  errorSpec
	stop   string
}

// toolCallSpec is a tool call that a step of the script makes.
type toolCallSpec struct {
	name  string
	input any // map[string]any, or *template.Template for a free-text tool
}

// errorSpec is the error with which a step of the script answers.
type errorSpec struct {
	status     int
	kind       string // "" means the API's own type for the status
	retryAfter time.Duration
}
