package opencode

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// importFile is what `opencode import` is given.
const importFile = agent.Unkept + "/opencode-import.json"

// importing returns the command that first has the CLI import the conversation of a transcript that came from outside; plugin.js forks it then, as it forks
// sessions of the CLI's own. An import that fails shows by there being no such session. A second import of the same file changes nothing.
func importing(l agent.Launch, c agent.Command) (agent.Command, error) {
	shell, err := acp.Find(l, "sh")
	if err != nil {
		return c, err
	}
	root, err := os.OpenRoot(l.State)
	if err != nil {
		return c, fmt.Errorf("state folder of OpenCode: %w", err)
	}
	defer root.Close() //nolint:errcheck // every write was checked
	raw, err := adopt(root, l.Resume)
	if err == nil {
		err = errors.Join(root.RemoveAll(importFile), root.WriteFile(importFile, raw, 0o600))
	} else {
		err = root.RemoveAll(importFile) // the CLI finds nothing to import
	}
	if err != nil {
		return c, fmt.Errorf("transcript for OpenCode: %w", err)
	}
	// What the import prints is none of the protocol's lines, and its plugins must not fork.
	c.Args = []string{"-c", forkVariable + `= "$0" import --pure "$1" >&2 </dev/null; exec "$0" acp`, c.Path, filepath.Join(l.State, importFile)}
	c.Path = shell
	return c, nil
}

// exported is what `opencode export` prints.
type exported struct {
	Info     object `json:"info"`
	Messages []struct {
		Info  object   `json:"info"`
		Parts []object `json:"parts"`
	} `json:"messages"`
}

// What a copy keeps of a session and of its messages. The rest is the CLI's own: rules of permission, shares, links to other sessions,
// snapshots and patches of files that are not here, the other machine's folders.
var (
	keptSession = []string{"id", "slug", "title", "version", "time"}
	keptMessage = []string{"id", "sessionID", "role", "time", "agent", "model", "parentID", "mode", "cost", "tokens", "modelID", "providerID", "finish", "error", "summary"}
	keptParts   = map[string]bool{"text": true, "reasoning": true, "tool": true, "step-start": true, "step-finish": true, "compaction": true}
)

// adopt returns the conversation of the provided transcript for `opencode import`.
func adopt(root *os.Root, session string) ([]byte, error) {
	f, err := root.Open(agent.Provided)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	raw, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	var t exported
	if err := json.Unmarshal(raw, &t); err != nil {
		return nil, err
	}
	if t.Info["id"] != session {
		return nil, fmt.Errorf("it is of session %.100v", t.Info["id"])
	}
	t.Info = kept(t.Info, keptSession)
	t.Info["projectID"], t.Info["directory"] = "global", "/" // the import puts its own in their place
	for i := range t.Messages {
		m := &t.Messages[i]
		m.Info = kept(m.Info, keptMessage)
		if m.Info["role"] == "assistant" {
			m.Info["path"] = object{"cwd": "/", "root": "/"}
		}
		parts := []object{}
		for _, p := range m.Parts {
			if keptPart(p) {
				parts = append(parts, p)
			}
		}
		m.Parts = parts
	}
	return json.Marshal(t)
}

func kept(o object, keys []string) object {
	out := object{}
	for _, k := range keys {
		if v, ok := o[k]; ok {
			out[k] = v
		}
	}
	return out
}

// keptPart reports whether a part is a part of the conversation that stands for itself: a file is kept if its content is in the part.
func keptPart(p object) bool {
	kind, _ := p["type"].(string)
	if state, ok := p["state"].(object); ok {
		delete(state, "attachments")
	}
	if url, _ := p["url"].(string); kind == "file" {
		delete(p, "source")
		return strings.HasPrefix(url, "data:")
	}
	return keptParts[kind]
}
