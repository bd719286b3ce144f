package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/compat"
)

// acmeTenant is the name of a second tenant, whose budget allows one turn.
const acmeTenant = "acme"

// secret is the value of the secret TOKEN in the environment staging. It protects nothing.
const secret = "dummy-secret-of-the-recording"

const programQuery = "Write a program that prints the first ten primes and run it."

// mockllmRules are rules of the scripted model that come before those of mockllm's default script.
const mockllmRules = `
  - name: endless
    match: {user: {regex: '^work without end'}}
    steps:
      - endless: {text: "still at work\n", piece: 14, delay: 200ms}
  - name: slow
    match: {user: {regex: '^count slowly'}}
    steps:
      - text: {text: "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30", piece: 3, delay: 100ms}
  - name: fails
    match: {user: {regex: '^fail'}}
    steps:
      - error: {status: 400, message: "the script refuses this request"}
  - name: large
    match: {user: {regex: '^large'}}
    steps:
      - text: "That was large."
`

const definitions = `
kind: environment
slug: staging
spec:
  variables:
    REGION: {value: eu}
    TOKEN: {secret: true, value: ` + secret + `}
---
kind: agent
slug: reviewer
org: payments
tags: [stable]
spec:
  architecture: spool
  instructions: You review changes.
  skills: [style@stable]
  files:
    - path: rules.md
      content: "# Rules\n"
---
kind: instance
slug: reviewer
spec:
  agent: payments/reviewer@stable
  environments: [staging]
`

// work creates the recorded sessions on a running build of Spool.
type work struct {
	*compat.Server
	dir      string // for files that the command line tool reads
	manifest compat.Manifest
}

// recordAllSessions creates sessions of every kind, the open one last.
func (w *work) recordAllSessions() error {
	for _, step := range []func() error{
		w.createKeys, w.applyCatalogue, w.recordConversation, w.recordFiles, w.recordDefined, w.recordAgents, w.recordControls, w.recordFailures, w.recordBudget, w.recordDeleted, w.recordIdleSession, w.recordOpenTurn,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// createKeys creates an API key of each tenant.
func (w *work) createKeys() error {
	w.manifest.Keys = map[string]string{}
	for _, tenant := range []string{"default", acmeTenant} {
		var made struct{ Key string }
		if err := w.Call(w.manifest.RootKey, "POST", "/api/keys", map[string]any{"name": "recording", "tenant": tenant}, &made); err != nil {
			return err
		}
		w.manifest.Keys[tenant] = made.Key
	}
	return nil
}

// applyCatalogue pushes a skill and applies the definitions.
func (w *work) applyCatalogue() error {
	skill := filepath.Join(w.dir, "style")
	if err := os.MkdirAll(skill, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(skill, "SKILL.md"), []byte("---\nname: style\ndescription: How code is written here.\n---\nWrite plainly.\n"), 0o600); err != nil {
		return err
	}
	file := filepath.Join(w.dir, "definitions.yaml")
	if err := os.WriteFile(file, []byte(definitions), 0o600); err != nil {
		return err
	}
	key := w.manifest.Keys["default"]
	if _, err := w.CLI(key, "skills", "push", skill, "--tag", "stable"); err != nil {
		return err
	}
	_, err := w.CLI(key, "agents", "apply", "-f", file)
	return err
}

// create creates a session of a tenant.
func (w *work) create(tenant, name string, body map[string]any) (compat.Session, error) {
	s := compat.Session{Name: name, Tenant: tenant}
	body["metadata"] = map[string]any{"recorded": name}
	var made struct{ SessionID string }
	err := w.Call(w.manifest.Keys[tenant], "POST", "/api/sessions", body, &made)
	s.ID = made.SessionID
	w.manifest.Sessions = append(w.manifest.Sessions, s)
	return s, err
}

// post posts a query and returns its execution.
func (w *work) post(s compat.Session, text string) (execution string, err error) {
	var a struct{ ExecutionID string }
	err = w.Call(w.manifest.Keys[s.Tenant], "POST", "/api/sessions/"+s.ID+"/messages", map[string]any{"content": text}, &a)
	return a.ExecutionID, err
}

// await blocks until an execution has an event of one of the types, or, without types, until it has ended.
func (w *work) await(s compat.Session, execution string, types ...events.Type) (events.Wire, error) {
	return w.Until(w.manifest.Keys[s.Tenant], s.ID, 0, func(e events.Wire) bool {
		if e.ExecutionID != execution {
			return false
		}
		for _, t := range types {
			if e.Type == t {
				return true
			}
		}
		return len(types) == 0 && events.Terminal(e.Type)
	})
}

// runTurn runs a query to its end, which must have the given type.
func (w *work) runTurn(s compat.Session, text string, end events.Type) error {
	execution, err := w.post(s, text)
	if err != nil {
		return err
	}
	e, err := w.await(s, execution)
	if err != nil {
		return err
	}
	if e.Type != end {
		return fmt.Errorf("session %s: %q ended with %s %s, and not with %s", s.Name, text, e.Type, e.Data, end)
	}
	return nil
}

var (
	completed = events.ExecutionCompleted{}.EventType()
	failed    = events.ExecutionFailed{}.EventType()
	cancelled = events.ExecutionCancelled{}.EventType()
)

// runTurns creates a session and runs queries that complete.
func (w *work) runTurns(tenant, name string, body map[string]any, texts ...string) error {
	s, err := w.create(tenant, name, body)
	if err != nil {
		return err
	}
	for _, text := range texts {
		if err := w.runTurn(s, text, completed); err != nil {
			return err
		}
	}
	return nil
}

// recordConversation creates a session with two turns of the built-in agent.
func (w *work) recordConversation() error {
	return w.runTurns("default", compat.Conversation, map[string]any{"architecture": "spool"},
		"Remember the code word heron, then write a program that prints the first ten primes and run it.", "What did I ask you to remember?")
}

// recordFiles creates a session with files that a client uploaded, and with a message that is too large for a commit.
func (w *work) recordFiles() error {
	s, err := w.create("default", "files", map[string]any{
		"architecture": "spool", "workspaceFiles": []map[string]any{{"path": "notes.txt", "content": "the notes\n"}},
	})
	if err != nil {
		return err
	}
	if err := w.runTurn(s, programQuery, completed); err != nil {
		return err
	}
	large := []byte(strings.Repeat("0123456789abcdef", 40<<10)) // 640 KiB
	if err := w.Call(w.manifest.Keys["default"], "PUT", "/api/sessions/"+s.ID+"/files/large.txt", large, nil); err != nil {
		return err
	}
	// This message does not fit into a commit.
	return w.runTurn(s, "large "+strings.Repeat("a message of many words ", 20<<10), completed)
}

// recordDefined creates a session of an applied agent, in an environment with a secret.
func (w *work) recordDefined() error {
	return w.runTurns("default", compat.Defined, map[string]any{"instance": "reviewer", "environments": []string{"staging"}}, "hello", "and again")
}

// recordAgents creates a session of each CLI.
func (w *work) recordAgents() error {
	for _, a := range []string{compat.ClaudeCode, compat.Codex, compat.OpenCode} {
		if err := w.runTurns("default", a, map[string]any{"architecture": a}, "Remember the code word heron.", programQuery); err != nil {
			return err
		}
	}
	return nil
}

// recordControls creates a session in which a query was cancelled while another was queued and withdrawn, one that was
// paused and resumed, and one whose sandbox was terminated.
func (w *work) recordControls() error {
	key := w.manifest.Keys["default"]
	s, err := w.create("default", "cancelled", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	runs, err := w.post(s, "work without end")
	if err != nil {
		return err
	}
	waits, err := w.post(s, "hello")
	if err != nil {
		return err
	}
	if _, err := w.await(s, runs, events.TextDelta); err != nil {
		return err
	}
	for _, x := range []string{waits, runs} {
		if err := w.Call(key, "POST", "/api/executions/"+x+"/cancel", map[string]any{}, nil); err != nil {
			return err
		}
		if _, err := w.await(s, x, cancelled, events.ExecutionWithdrawn{}.EventType()); err != nil {
			return err
		}
	}
	s, err = w.create("default", "paused", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	if runs, err = w.post(s, "count slowly"); err != nil {
		return err
	}
	for _, step := range []struct {
		after events.Type
		do    string
	}{{events.TextDelta, "pause"}, {events.ExecutionPaused{}.EventType(), "resume"}} {
		if _, err := w.await(s, runs, step.after); err != nil {
			return err
		}
		if err := w.Call(key, "POST", "/api/executions/"+runs+"/"+step.do, map[string]any{}, nil); err != nil {
			return err
		}
	}
	if _, err := w.await(s, runs, completed); err != nil {
		return err
	}
	s, err = w.create("default", "terminated", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	if runs, err = w.post(s, "work without end"); err != nil {
		return err
	}
	if _, err := w.await(s, runs, events.TextDelta); err != nil {
		return err
	}
	if err := w.Call(key, "POST", "/api/executions/"+runs+"/terminate", map[string]any{}, nil); err != nil {
		return err
	}
	_, err = w.await(s, runs, cancelled)
	return err
}

// recordFailures creates a session whose turn fails.
func (w *work) recordFailures() error {
	s, err := w.create("default", "failed", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	return w.runTurn(s, "fail", failed)
}

// recordBudget uses up the budget of a tenant and that of a session.
func (w *work) recordBudget() error {
	path := "/api/budgets/total"
	if err := w.Call(w.manifest.RootKey, "PUT", path, map[string]any{"tenant": acmeTenant, "budget": map[string]any{"turns": 2}}, nil); err != nil {
		return err
	}
	s, err := w.create(acmeTenant, compat.Budget, map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	for _, end := range []events.Type{completed, completed, failed} {
		if err := w.runTurn(s, "hello", end); err != nil {
			return err
		}
	}
	return nil
}

// recordDeleted creates a session and deletes it.
func (w *work) recordDeleted() error {
	s, err := w.create("default", compat.Deleted, map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	if err := w.runTurn(s, "hello", completed); err != nil {
		return err
	}
	w.manifest.Sessions[len(w.manifest.Sessions)-1].Deleted = true
	return w.Call(w.manifest.Keys["default"], "DELETE", "/api/sessions/"+s.ID, nil, nil)
}

// recordIdleSession creates a session whose idle sandbox was removed after a snapshot.
func (w *work) recordIdleSession() error {
	s, err := w.create("default", "idle", map[string]any{"architecture": "spool", "sessionOptions": map[string]any{"idleTimeoutMs": 1000}})
	if err != nil {
		return err
	}
	if err := w.runTurn(s, programQuery, completed); err != nil {
		return err
	}
	_, err = w.Until(w.manifest.Keys["default"], s.ID, 0, func(e events.Wire) bool { return e.Type == (events.SandboxTerminated{}).EventType() })
	return err
}

// recordOpenTurn leaves a turn that is running, and a query that is queued behind it.
func (w *work) recordOpenTurn() error {
	s, err := w.create("default", compat.Open, map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	runs, err := w.post(s, "work without end")
	if err != nil {
		return err
	}
	if _, err := w.post(s, "hello"); err != nil {
		return err
	}
	_, err = w.await(s, runs, events.TextDelta)
	return err
}
