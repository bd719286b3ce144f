package claudecode

import (
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
)

// copyProvidedTranscript copies the conversation of a transcript that a client uploaded to the path to, as the
// transcript of the session id. It returns the arguments with which the CLI resumes that session.
func copyProvidedTranscript(l agent.Launch, id, to string) ([]string, error) {
	workspace, err := filepath.EvalSymlinks(l.Workspace)
	if err != nil {
		return nil, err
	}
	edit := transcriptConverter{id: id, workspace: workspace}.convertLine
	if err := transcript.Copy(filepath.Join(l.State, agent.ProvidedTranscript), to, "", edit); err != nil {
		return nil, removeTranscriptCopy(to) // OpenSession reports that the conversation is lost
	}
	return []string{"--resume", id}, nil
}

// keptLineTypes are the types of transcript lines that belong to the conversation and are copied. All other lines are
// notes of the CLI, on which it would act when it resumes: queued prompts, modes, histories of files, working trees,
// names of agents.
var keptLineTypes = []string{"user", "assistant", "system", "attachment", "progress"}

// transcriptConverter converts lines of an uploaded transcript to lines of a session in this workspace.
type transcriptConverter struct{ id, workspace string }

// convertLine keeps the lines of the conversation, with the session id and the folder of this workspace, and drops all
// other lines. It is a transcript.EditLine.
func (a transcriptConverter) convertLine(raw transcript.Line) (transcript.Line, transcript.LineAction) {
	line := transcript.ParseMembers(raw)
	if transcript.ParseString(line["uuid"]) == "" || !slices.Contains(keptLineTypes, transcript.ParseString(line["type"])) {
		return nil, transcript.DropLine
	}
	delete(line, "permissionMode")
	delete(line, "gitBranch")
	line["sessionId"], line["cwd"] = transcript.EncodeJSON(a.id), transcript.EncodeJSON(a.workspace)
	return transcript.EncodeJSON(line), transcript.KeepLine
}
