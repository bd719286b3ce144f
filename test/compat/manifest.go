// Package compat opens data that a released build wrote with the present build. Command record creates such data;
// README.md describes how.
package compat

import (
	"encoding/json"

	"github.com/spoolhq/spool/pkg/events"
)

// Recording describes the data folder that a released build wrote: its sessions as that build returned them, and its
// log. The tests compare it with what the present build returns for the same data.
type Recording struct {
	Commit string `json:"commit"` // commit of the build that wrote the data
	// Folder is the path of the data folder during the recording. The records of agents in local sandboxes hold
	// absolute paths.
	Folder   string            `json:"folder"`
	RootKey  string            `json:"rootKey"` // root key; a dummy
	Keys     map[string]string `json:"keys"`    // API key by tenant; dummies
	Secret   string            `json:"secret"`  // the value of the secret of environment staging; a dummy
	Last     uint64            `json:"last"`    // sequence of the last commit in EVENTS-0
	Sessions []RecordedSession `json:"sessions"`
	// Uncounted are the sequences of the commits in EVENTS-0 with a run_retired event whose count of commits wrapped.
	Uncounted []uint64         `json:"uncounted,omitempty"`
	Log       []RecordedCommit `json:"log"` // every message of EVENTS-0, in order
}

// RecordedSession holds the answers of the released build about one session at the time when its data was recorded.
type RecordedSession struct {
	Name    string `json:"name"` // kind of the session; see command record
	ID      string `json:"id"`
	Tenant  string `json:"tenant"`
	Deleted bool   `json:"deleted,omitempty"`
	// Listed is the session's entry of GET /api/sessions. It is absent for a deleted session.
	Listed json.RawMessage `json:"listed,omitempty"`
	// Executions are the session's entries of GET /api/sessions/{id}/executions, in their order.
	Executions []json.RawMessage `json:"executions,omitempty"`
	// Blocks are the session's entries of GET /api/sessions/{id}/blocks.
	Blocks []json.RawMessage `json:"blocks,omitempty"`
	// Files are the paths in the session's last snapshot.
	Files []string `json:"files,omitempty"`
	// Events are the session's entries of GET /api/sessions/{id}/events.
	Events []events.WireEvent `json:"events,omitempty"`
}

// RecordedCommit describes one message of the recorded log.
type RecordedCommit struct {
	Seq     uint64 `json:"seq"` // in EVENTS-0; its position is 0-<seq>
	Subject string `json:"subject"`
	ID      string `json:"id"`
	Hash    string `json:"hash"`   // hash in the chain
	SHA256  string `json:"sha256"` // hash of the stored message
}

// Names of sessions that tests refer to.
const (
	// ConversationSession is the name of the recorded session with two turns of the built-in agent.
	ConversationSession = "conversation"
	// UsedUpBudgetSession is the name of the recorded session of a tenant whose budget is used up.
	UsedUpBudgetSession = "budget"
	// AppliedAgentSession is the name of the recorded session of an agent with a skill, in an environment with a secret.
	AppliedAgentSession = "defined"
	// DeletedSession is the name of the recorded session that was deleted.
	DeletedSession = "deleted"
	// OpenTurnSession is the name of the recorded session with a turn that was running when the build was stopped.
	OpenTurnSession = "open"
	// ClaudeCodeSession is the name of the recorded session with the architecture claude-code.
	ClaudeCodeSession = "claude-code"
	// CodexSession is the name of the recorded session with the architecture codex.
	CodexSession = "codex"
	// OpenCodeSession is the name of the recorded session with the architecture opencode.
	OpenCodeSession = "opencode"
)
