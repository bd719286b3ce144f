package opencode

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
)

// importFile is the path, relative to the state folder, of the file that `opencode import` reads.
const importFile = agent.UnsavedFolder + "/opencode-import.json"

// importCommand returns a command that first makes the CLI import the conversation of an uploaded transcript, and then
// runs c. plugin.js then forks the imported session, as it forks the CLI's own. If the import fails, the session does
// not exist, and the fork fails. A second import of the same file changes nothing.
func importCommand(l agent.Launch, c agent.Command) (agent.Command, error) {
	shell, err := acp.FindProgram(l, "sh")
	if err != nil {
		return c, err
	}
	root, err := os.OpenRoot(l.State)
	if err != nil {
		return c, fmt.Errorf("state folder of OpenCode: %w", err)
	}
	defer root.Close() //nolint:errcheck // every write was checked
	raw, err := convertTranscript(root, l.Resume)
	if err == nil {
		err = errors.Join(root.RemoveAll(importFile), root.WriteFile(importFile, raw, 0o600))
	} else {
		err = root.RemoveAll(importFile) // the CLI finds nothing to import
	}
	if err != nil {
		return c, fmt.Errorf("transcript for OpenCode: %w", err)
	}
	// The output of the import is not part of the protocol, and its plugins must not fork.
	c.Args = []string{"-c", forkSessionVariable + `= "$0" import --pure "$1" >&2 </dev/null; exec "$0" acp`, c.Path, filepath.Join(l.State, importFile)}
	c.Path = shell
	return c, nil
}

// jsonMembers are the members of a JSON object, not decoded, so that values that are not used stay unchanged.
type jsonMembers = map[string]json.RawMessage

// exportedSession is the output of `opencode export`.
type exportedSession struct {
	Info     jsonMembers       `json:"info"`
	Messages []exportedMessage `json:"messages"`
}

// exportedMessage is a message in the output of `opencode export`.
type exportedMessage struct {
	Info  jsonMembers   `json:"info"`
	Parts []jsonMembers `json:"parts"`
}

// The parts of a session and of its messages that a copy keeps. The CLI writes the rest anew: permission rules, shares,
// links to other sessions, snapshots and patches of files that do not exist here, and the folders of the other machine.
var (
	keptSessionFields = []string{"id", "slug", "title", "version", "time"}
	keptMessageFields = []string{"id", "sessionID", "role", "time", "agent", "model", "parentID", "mode", "cost", "tokens", "modelID", "providerID", "finish", "error", "summary"}
	keptPartTypes     = []string{"text", "reasoning", "tool", "step-start", "step-finish", "compaction"}
)

// convertTranscript returns the conversation of the uploaded transcript in the state folder root, as input for
// `opencode import`. session is the id of the imported session.
func convertTranscript(root *os.Root, session string) ([]byte, error) {
	f, err := root.Open(agent.ProvidedTranscript)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	var t exportedSession
	if err := json.NewDecoder(f).Decode(&t); err != nil {
		return nil, err
	}
	if id := transcript.ParseString(t.Info["id"]); id != session {
		return nil, fmt.Errorf("it is the transcript of session %.100q", id)
	}
	t.Info = pickMembers(t.Info, keptSessionFields)
	t.Info["projectID"], t.Info["directory"] = transcript.EncodeJSON("global"), transcript.EncodeJSON("/") // the import replaces them
	for i := range t.Messages {
		m := &t.Messages[i]
		if m.Info = pickMembers(m.Info, keptMessageFields); transcript.ParseString(m.Info["role"]) == "assistant" {
			m.Info["path"] = json.RawMessage(`{"cwd":"/","root":"/"}`)
		}
		parts := []jsonMembers{}
		for _, p := range m.Parts {
			if isKeptPart(p) {
				parts = append(parts, p)
			}
		}
		m.Parts = parts
	}
	return json.Marshal(t)
}

// pickMembers returns those members of m whose names are in names.
func pickMembers(m jsonMembers, names []string) jsonMembers {
	out := jsonMembers{}
	for _, name := range names {
		if v, ok := m[name]; ok {
			out[name] = v
		}
	}
	return out
}

// isKeptPart reports whether a part of a message belongs to the conversation and is self-contained: a file is kept if
// the part holds its content.
func isKeptPart(p jsonMembers) bool {
	kind := transcript.ParseString(p["type"])
	if state := transcript.ParseMembers(p["state"]); state["attachments"] != nil {
		delete(state, "attachments")
		p["state"] = transcript.EncodeJSON(state)
	}
	if kind == "file" {
		delete(p, "source")
		return strings.HasPrefix(transcript.ParseString(p["url"]), "data:")
	}
	return slices.Contains(keptPartTypes, kind)
}
