package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/compat"
)

// acmeTenant is the name of a second tenant, whose budget allows two turns.
const acmeTenant = "acme"

// tokenSecret is the value of the secret TOKEN in the environment staging. It protects nothing.
const tokenSecret = "dummy-secret-of-the-recording"

// programQuery is a message to which the scripted model answers by writing a file and running it.
const programQuery = "Write a program that prints the first ten primes and run it."

// mockllmRules are rules of the scripted model, in mockllm's format. They come before those of mockllm's default
// script.
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

// catalogueDefinitions are the environment, the agent and the instance of the recording, as YAML for "spool agents
// apply -f".
const catalogueDefinitions = `
kind: environment
slug: staging
spec:
  variables:
    REGION: {value: eu}
    TOKEN: {secret: true, value: ` + tokenSecret + `}
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

// recorder creates the recorded sessions on a running server, and holds the description of them.
type recorder struct {
	*compat.Server
	dir      string // for files that the command line tool reads
	manifest compat.Recording
}

// createAllSessions creates sessions of every kind. The one with the running turn is the last one.
func (w *recorder) createAllSessions() error {
	for _, step := range []func() error{
		w.createKeys, w.applyCatalogue, w.createConversation, w.createFilesSession, w.createAppliedAgentSession, w.createCLISessions, w.createControlledSessions, w.createFailedSession, w.createUsedUpBudgetSession, w.createDeletedSessions, w.createIdleSession, w.createOpenTurnSession,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// createKeys creates an API key of each tenant, and adds it to the recording.
func (w *recorder) createKeys() error {
	w.manifest.Keys = map[string]string{}
	for _, tenant := range []string{"default", acmeTenant} {
		var made struct{ Key string }
		if err := w.CallAPI(w.manifest.RootKey, "POST", "/api/keys", map[string]any{"name": "recording", "tenant": tenant}, &made); err != nil {
			return err
		}
		w.manifest.Keys[tenant] = made.Key
	}
	return nil
}

// applyCatalogue pushes a skill and applies catalogueDefinitions.
func (w *recorder) applyCatalogue() error {
	skill := filepath.Join(w.dir, "style")
	if err := os.MkdirAll(skill, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(skill, "SKILL.md"), []byte("---\nname: style\ndescription: How code is written here.\n---\nWrite plainly.\n"), 0o600); err != nil {
		return err
	}
	file := filepath.Join(w.dir, "definitions.yaml")
	if err := os.WriteFile(file, []byte(catalogueDefinitions), 0o600); err != nil {
		return err
	}
	key := w.manifest.Keys["default"]
	if _, err := w.RunCLI(key, "skills", "push", skill, "--tag", "stable"); err != nil {
		return err
	}
	_, err := w.RunCLI(key, "agents", "apply", "-f", file)
	return err
}

// createSession creates a session of a tenant with the request body, and adds it to the recording under a name.
func (w *recorder) createSession(tenant, name string, body map[string]any) (compat.RecordedSession, error) {
	s := compat.RecordedSession{Name: name, Tenant: tenant}
	body["metadata"] = map[string]any{"recorded": name}
	var made struct{ SessionID string }
	err := w.CallAPI(w.manifest.Keys[tenant], "POST", "/api/sessions", body, &made)
	s.ID = made.SessionID
	w.manifest.Sessions = append(w.manifest.Sessions, s)
	return s, err
}

// postQuery posts text as a query to a session and returns the id of its execution.
func (w *recorder) postQuery(s compat.RecordedSession, text string) (execution string, err error) {
	var a struct{ ExecutionID string }
	err = w.CallAPI(w.manifest.Keys[s.Tenant], "POST", "/api/sessions/"+s.ID+"/messages", map[string]any{"content": text}, &a)
	return a.ExecutionID, err
}

// awaitEvent blocks until an execution has an event of one of the types, and returns the event. Without types, it waits
// for the end of the execution.
func (w *recorder) awaitEvent(s compat.RecordedSession, execution string, types ...events.Type) (events.WireEvent, error) {
	return w.AwaitEvent(w.manifest.Keys[s.Tenant], s.ID, 0, func(e events.WireEvent) bool {
		if e.ExecutionID != execution {
			return false
		}
		for _, t := range types {
			if e.Type == t {
				return true
			}
		}
		return len(types) == 0 && events.IsTerminal(e.Type)
	})
}

// runTurn posts text as a query to a session and blocks until the execution has ended. It returns an error if the
// terminal event does not have the type end.
func (w *recorder) runTurn(s compat.RecordedSession, text string, end events.Type) error {
	execution, err := w.postQuery(s, text)
	if err != nil {
		return err
	}
	e, err := w.awaitEvent(s, execution)
	if err != nil {
		return err
	}
	if e.Type != end {
		return fmt.Errorf("session %s: %q ended with %s %s, and not with %s", s.Name, text, e.Type, e.Data, end)
	}
	return nil
}

var (
	// completedType is the type of the event that ends a completed execution.
	completedType = events.ExecutionCompleted{}.EventType()
	// failedType is the type of the event that ends a failed execution.
	failedType = events.ExecutionFailed{}.EventType()
	// cancelledType is the type of the event that ends a cancelled execution.
	cancelledType = events.ExecutionCancelled{}.EventType()
)

// createWithTurns creates a session of a tenant with the request body, and runs a query with each of the texts. It
// returns an error if a query does not complete.
func (w *recorder) createWithTurns(tenant, name string, body map[string]any, texts ...string) error {
	s, err := w.createSession(tenant, name, body)
	if err != nil {
		return err
	}
	for _, text := range texts {
		if err := w.runTurn(s, text, completedType); err != nil {
			return err
		}
	}
	return nil
}

// createConversation creates a session with two turns of the built-in agent.
func (w *recorder) createConversation() error {
	return w.createWithTurns("default", compat.ConversationSession, map[string]any{"architecture": "spool"},
		"Remember the code word heron, then write a program that prints the first ten primes and run it.", "What did I ask you to remember?")
}

// createFilesSession creates a session with files that a client uploaded, and with a message that is too large for a
// commit.
func (w *recorder) createFilesSession() error {
	s, err := w.createSession("default", "files", map[string]any{
		"architecture": "spool", "workspaceFiles": []map[string]any{{"path": "notes.txt", "content": "the notes\n"}},
	})
	if err != nil {
		return err
	}
	if err := w.runTurn(s, programQuery, completedType); err != nil {
		return err
	}
	large := []byte(strings.Repeat("0123456789abcdef", 40<<10)) // 640 KiB
	if err := w.CallAPI(w.manifest.Keys["default"], "PUT", "/api/sessions/"+s.ID+"/files/large.txt", large, nil); err != nil {
		return err
	}
	// This message does not fit into a commit.
	return w.runTurn(s, "large "+strings.Repeat("a message of many words ", 20<<10), completedType)
}

// createAppliedAgentSession creates a session of the agent in catalogueDefinitions, with its environment that has a
// secret.
func (w *recorder) createAppliedAgentSession() error {
	return w.createWithTurns("default", compat.AppliedAgentSession, map[string]any{"instance": "reviewer", "environments": []string{"staging"}}, "hello", "and again")
}

// createCLISessions creates a session of each architecture that runs a CLI.
func (w *recorder) createCLISessions() error {
	for _, a := range []string{compat.ClaudeCodeSession, compat.CodexSession, compat.OpenCodeSession} {
		if err := w.createWithTurns("default", a, map[string]any{"architecture": a}, "Remember the code word heron.", programQuery); err != nil {
			return err
		}
	}
	return nil
}

// createControlledSessions creates three sessions: in the first one, a running and a queued query were cancelled; in
// the second one, a query was paused and resumed; in the third one, the sandbox was terminated.
func (w *recorder) createControlledSessions() error {
	key := w.manifest.Keys["default"]
	s, err := w.createSession("default", "cancelled", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	runs, err := w.postQuery(s, "work without end")
	if err != nil {
		return err
	}
	waits, err := w.postQuery(s, "hello")
	if err != nil {
		return err
	}
	if _, err := w.awaitEvent(s, runs, events.TextDelta); err != nil {
		return err
	}
	for _, x := range []string{waits, runs} {
		if err := w.CallAPI(key, "POST", "/api/executions/"+x+"/cancel", map[string]any{}, nil); err != nil {
			return err
		}
		if _, err := w.awaitEvent(s, x, cancelledType, events.ExecutionWithdrawn{}.EventType()); err != nil {
			return err
		}
	}
	s, err = w.createSession("default", "paused", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	if runs, err = w.postQuery(s, "count slowly"); err != nil {
		return err
	}
	for _, step := range []struct {
		after events.Type
		do    string
	}{{events.TextDelta, "pause"}, {events.ExecutionPaused{}.EventType(), "resume"}} {
		if _, err := w.awaitEvent(s, runs, step.after); err != nil {
			return err
		}
		if err := w.CallAPI(key, "POST", "/api/executions/"+runs+"/"+step.do, map[string]any{}, nil); err != nil {
			return err
		}
	}
	if _, err := w.awaitEvent(s, runs, completedType); err != nil {
		return err
	}
	s, err = w.createSession("default", "terminated", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	if runs, err = w.postQuery(s, "work without end"); err != nil {
		return err
	}
	if _, err := w.awaitEvent(s, runs, events.TextDelta); err != nil {
		return err
	}
	if err := w.CallAPI(key, "POST", "/api/executions/"+runs+"/terminate", map[string]any{}, nil); err != nil {
		return err
	}
	_, err = w.awaitEvent(s, runs, cancelledType)
	return err
}

// createFailedSession creates a session whose only turn fails.
func (w *recorder) createFailedSession() error {
	s, err := w.createSession("default", "failed", map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	return w.runTurn(s, "fail", failedType)
}

// createUsedUpBudgetSession creates a session of the second tenant, and takes turns in it until the tenant's budget is
// used up and a turn fails.
func (w *recorder) createUsedUpBudgetSession() error {
	path := "/api/budgets/total"
	if err := w.CallAPI(w.manifest.RootKey, "PUT", path, map[string]any{"tenant": acmeTenant, "budget": map[string]any{"turns": 2}}, nil); err != nil {
		return err
	}
	s, err := w.createSession(acmeTenant, compat.UsedUpBudgetSession, map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	for _, end := range []events.Type{completedType, completedType, failedType} {
		if err := w.runTurn(s, "hello", end); err != nil {
			return err
		}
	}
	return nil
}

// createDeletedSessions creates three sessions, takes a turn in each and deletes them. It returns after their content is
// erased.
func (w *recorder) createDeletedSessions() error {
	var ids []string
	for range 3 {
		s, err := w.createSession("default", compat.DeletedSession, map[string]any{"architecture": "spool"})
		if err != nil {
			return err
		}
		if err := w.runTurn(s, "hello", completedType); err != nil {
			return err
		}
		w.manifest.Sessions[len(w.manifest.Sessions)-1].Deleted = true
		if err := w.CallAPI(w.manifest.Keys["default"], "DELETE", "/api/sessions/"+s.ID, nil, nil); err != nil {
			return err
		}
		ids = append(ids, s.ID)
	}
	// A pass lists a session until its content is erased and the read models have recorded it.
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
		out, err := w.RunCLI("", "gc", "--grace", "1ms", "--json")
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(out, id) }) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("deleted sessions are not erased: %s", out)
		}
	}
}

// createIdleSession creates a session whose sandbox was removed after a time without turns; its workspace is in a
// snapshot.
func (w *recorder) createIdleSession() error {
	s, err := w.createSession("default", "idle", map[string]any{"architecture": "spool", "sessionOptions": map[string]any{"idleTimeoutMs": 1000}})
	if err != nil {
		return err
	}
	if err := w.runTurn(s, programQuery, completedType); err != nil {
		return err
	}
	_, err = w.AwaitEvent(w.manifest.Keys["default"], s.ID, 0, func(e events.WireEvent) bool { return e.Type == (events.SandboxTerminated{}).EventType() })
	return err
}

// createOpenTurnSession creates a session with a turn that does not end and a query that is queued behind it.
func (w *recorder) createOpenTurnSession() error {
	s, err := w.createSession("default", compat.OpenTurnSession, map[string]any{"architecture": "spool"})
	if err != nil {
		return err
	}
	runs, err := w.postQuery(s, "work without end")
	if err != nil {
		return err
	}
	if _, err := w.postQuery(s, "hello"); err != nil {
		return err
	}
	_, err = w.awaitEvent(s, runs, events.TextDelta)
	return err
}
