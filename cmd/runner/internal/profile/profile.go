// Package profile stores the agent's profile in the state folder, for the following queries.
package profile

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// maxProfileSize is the maximum size of a profile in bytes.
const maxProfileSize = 4 << 20

// profileFileName is the name of the file in the state folder that stores the profile.
const profileFileName = "profile.json"

// Profile holds defaults for the fields of all later queries in a sandbox; a query's own fields take precedence. The
// runner stores it in the state folder, so snapshots contain it, and it must not contain secrets.
type Profile struct {
	SystemPrompt string `json:"systemPrompt,omitempty"`
	MemoryFile   string `json:"memoryFile,omitempty"` // content of CLAUDE.md or AGENTS.md
	Model        string `json:"model,omitempty"`

	Tools      events.ToolChoice     `json:"tools,omitzero"`
	Subagents  []events.SubagentSpec `json:"subagents,omitempty"`
	Commands   []events.CommandSpec  `json:"commands,omitempty"`
	MCPServers []runner.MCPServer    `json:"mcpServers,omitempty"`
	Skills     []runner.Skill        `json:"skills,omitempty"`
	MaxTurns   uint32                `json:"maxTurns,omitempty"`
}

// FillEmptyFields sets those fields of the query q that are empty to the profile's values.
func (p Profile) FillEmptyFields(q *runner.Query) {
	q.Model, q.SystemPrompt, q.MemoryFile = cmp.Or(q.Model, p.Model), cmp.Or(q.SystemPrompt, p.SystemPrompt), cmp.Or(q.MemoryFile, p.MemoryFile)
	if len(q.Tools.Allow)+len(q.Tools.Deny) == 0 {
		q.Tools = p.Tools
	}
	if len(q.Subagents) == 0 {
		q.Subagents = p.Subagents
	}
	if len(q.Commands) == 0 {
		q.Commands = p.Commands
	}
	if len(q.MCPServers) == 0 {
		q.MCPServers = p.MCPServers
	}
	if len(q.Skills) == 0 {
		q.Skills = p.Skills
	}
	q.MaxTurns = cmp.Or(q.MaxTurns, p.MaxTurns)
}

// Read decodes a profile in JSON from r. The error for an unknown field names the field.
func Read(r io.Reader) (Profile, error) {
	var p Profile
	raw, err := io.ReadAll(io.LimitReader(r, maxProfileSize+1))
	if err != nil {
		return p, fmt.Errorf("read profile: %w", err)
	}
	if len(raw) > maxProfileSize {
		return p, fmt.Errorf("profile: longer than %d bytes", maxProfileSize)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		return p, fmt.Errorf("profile: want a JSON object of systemPrompt, memoryFile, model, tools, subagents, commands, mcpServers, skills and maxTurns: %w", err)
	}
	if dec.More() {
		return p, errors.New("profile: more than one JSON object")
	}
	return p, nil
}

// Save stores p in the state folder, in place of an earlier profile.
func Save(state string, p Profile) error {
	raw, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return fmt.Errorf("encode profile: %w", err)
	}
	if err := os.MkdirAll(state, 0o700); err != nil {
		return fmt.Errorf("make state folder: %w", err)
	}
	tmp := filepath.Join(state, profileFileName+".new")
	if err := os.WriteFile(tmp, raw, 0o600); err != nil {
		return fmt.Errorf("write profile: %w", err)
	}
	if err := os.Rename(tmp, filepath.Join(state, profileFileName)); err != nil {
		return fmt.Errorf("write profile: %w", err)
	}
	return nil
}

// Load returns the profile that is stored in the state folder, or an empty one if there is none.
func Load(state string) (Profile, error) {
	f, err := os.Open(filepath.Join(state, profileFileName))
	if errors.Is(err, fs.ErrNotExist) {
		return Profile{}, nil
	}
	if err != nil {
		return Profile{}, fmt.Errorf("open profile: %w", err)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	return Read(f)
}
