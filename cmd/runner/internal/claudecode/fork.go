package claudecode

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
)

// resumeArgs returns the arguments with which the CLI resumes the session of a launch. For a fork it first copies the transcript. It returns none
// if there is no session to resume, or its transcript is lost.
//
// A fork is a copy of the transcript, cut after the anchor's line, under an id of its own. It is on disk before the
// CLI starts: with the CLI's --fork-session a process that is killed in its first turn leaves a session that knows
// nothing. Like that flag it leaves the original as it is.
func resumeArgs(l agent.Launch) ([]string, error) {
	if l.Resume == "" {
		return nil, nil
	}
	if l.Fork == nil {
		if !hasTranscript(l.Folders, l.Resume) && !copyFromOtherWorkspace(l) {
			return nil, nil
		}
		return []string{"--resume", l.Resume}, nil
	}
	id := transcript.ForkID(l)
	to, err := Adapter{}.TranscriptPath(l.Folders, id)
	if err != nil {
		return nil, err
	}
	if l.Fork.Provided {
		return copyProvidedTranscript(l, id, to)
	}
	from, err := originalTranscripts(l)
	if err != nil {
		return nil, err
	}
	for _, path := range from {
		cut := transcriptCutter{anchor: l.Fork.Anchor}
		if err := transcript.Copy(path, to, cut.anchor, cut.cutLine); err != nil {
			continue // OpenSession reports that the conversation is lost
		}
		args := []string{"--resume", id}
		if cut.kind == "user" {
			// Without it the CLI takes a tool's result at the end for a turn that was broken off, and adds
			// messages of its own to the conversation.
			args = append(args, "--resume-session-at", l.Fork.Anchor)
		}
		return args, nil
	}
	return nil, removeTranscriptCopy(to)
}

// copyFromOtherWorkspace copies the transcript of the session to resume from the folder of another workspace, in which the session has run before its
// state came to this sandbox. It reports whether there was one.
func copyFromOtherWorkspace(l agent.Launch) bool {
	list, err := originalTranscripts(l)
	if err != nil || len(list) < 2 {
		return false // OpenSession reports that the conversation is lost
	}
	keep := func(line transcript.Line) (transcript.Line, transcript.LineAction) { return line, transcript.KeepLine }
	return slices.ContainsFunc(list[1:], func(path string) bool { return transcript.Copy(path, list[0], "", keep) == nil })
}

// removeTranscriptCopy removes the copy of a transcript at the path to, which an earlier attempt may have written.
func removeTranscriptCopy(to string) error {
	if err := os.Remove(to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the copy of an earlier attempt: %w", err)
	}
	return nil
}

// whyNotResumable returns the reason why the session of a launch cannot be resumed, or "" if it can be, or there is
// none.
func whyNotResumable(l agent.Launch) string {
	switch {
	case l.Resume == "" || l.Fork == nil && hasTranscript(l.Folders, l.Resume) || l.Fork != nil && hasTranscript(l.Folders, transcript.ForkID(l)):
		return ""
	case l.Fork != nil && l.Fork.Anchor != "":
		return fmt.Sprintf("session %.100s of Claude Code has no transcript here with the line %.100q", l.Resume, l.Fork.Anchor)
	}
	return fmt.Sprintf("session %.100s of Claude Code has no transcript here", l.Resume)
}

// originalTranscripts returns the paths of the transcripts of the session to fork. The one of this workspace comes
// first: if the session has run in a sandbox with another workspace path, its transcript is in the folder for that
// path.
func originalTranscripts(l agent.Launch) ([]string, error) {
	own, err := Adapter{}.TranscriptPath(l.Folders, l.Resume)
	if err != nil {
		return nil, nil //nolint:nilerr // no id of the CLI's: the session is lost
	}
	projects := filepath.Dir(filepath.Dir(own))
	folders, err := os.ReadDir(projects)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("transcripts: %w", err)
	}
	list := []string{own}
	for _, f := range folders {
		if path := filepath.Join(projects, f.Name(), filepath.Base(own)); f.IsDir() && path != own {
			list = append(list, path)
		}
	}
	return list, nil
}

// transcriptCutter cuts a transcript after the line of an anchor.
type transcriptCutter struct {
	anchor string
	kind   string // type of the anchor's line; "" until cutLine has found it
}

// cutLine keeps every line up to the line of the anchor, which is the last one of the copy. It is a
// transcript.EditLine.
func (c *transcriptCutter) cutLine(raw transcript.Line) (transcript.Line, transcript.LineAction) {
	if c.anchor == "" || !bytes.Contains(raw, []byte(c.anchor)) {
		return raw, transcript.KeepLine
	}
	var l struct {
		UUID string `json:"uuid"`
		Type string `json:"type"`
	}
	if json.Unmarshal(raw, &l) != nil || l.UUID != c.anchor {
		return raw, transcript.KeepLine
	}
	c.kind = l.Type
	return raw, transcript.KeepLineAndStop
}
