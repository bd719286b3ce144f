package codex

import (
	"encoding/json"
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
)

// copyProvidedTranscript copies the conversation of a transcript that a client uploaded. The copy has the id of the new
// thread. Its path among the CLI's files does not depend on the transcript.
func copyProvidedTranscript(l agent.Launch) error {
	id := transcript.ForkID(l)
	to := filepath.Join(homeDir(l.Folders), "sessions", "2000", "01", "01", "rollout-2000-01-01T00-00-00-"+id+".jsonl")
	a := &transcriptConverter{id: id, workspace: l.Workspace}
	return copyIfPresent(filepath.Join(l.State, agent.ProvidedTranscript), to, "", a.convertLine)
}

// The parts of a transcript that a copy keeps. The CLI writes the rest anew: permissions, folders, settings and tools.
var (
	keptLineTypes  = []string{"session_meta", "response_item", "event_msg", "compacted"}
	keptEventTypes = []string{
		"task_started", "task_complete", "turn_aborted", "user_message", "agent_message", "agent_reasoning", "item_completed", "token_count",
		"context_compacted", "thread_rolled_back",
	}
	keptMetaFields = []string{"timestamp", "cli_version"}
)

// transcriptConverter converts an uploaded transcript to the transcript of a thread in this workspace.
type transcriptConverter struct {
	id, workspace string
	begun         bool // the first line was kept
}

// convertLine keeps the lines of the conversation, with the id and the folder of the new thread in the first line, and
// drops all other lines. It is a transcript.EditLine.
func (a *transcriptConverter) convertLine(raw transcript.Line) (transcript.Line, transcript.LineAction) {
	line := transcript.ParseMembers(raw)
	kind, payload := transcript.ParseString(line["type"]), transcript.ParseMembers(line["payload"])
	switch {
	case !slices.Contains(keptLineTypes, kind):
		return nil, transcript.DropLine
	case kind == "event_msg" && !slices.Contains(keptEventTypes, transcript.ParseString(payload["type"])):
		return nil, transcript.DropLine
	case kind == "session_meta" && a.begun: // of a conversation that this one was forked from
		return nil, transcript.DropLine
	case kind == "session_meta":
		a.begun = true
		line["payload"] = a.convertMeta(payload)
	}
	return transcript.EncodeJSON(line), transcript.KeepLine
}

// convertMeta returns the content of the copy's first line. before is the content of the uploaded transcript's first
// line.
func (a *transcriptConverter) convertMeta(before map[string]json.RawMessage) json.RawMessage {
	meta := map[string]json.RawMessage{}
	for _, key := range keptMetaFields {
		if v, ok := before[key]; ok {
			meta[key] = v
		}
	}
	for key, value := range map[string]string{
		"id": a.id, "session_id": a.id, "cwd": a.workspace, "originator": "spool", "source": "vscode", "model_provider": "spool",
	} {
		meta[key] = transcript.EncodeJSON(value)
	}
	return transcript.EncodeJSON(meta)
}
