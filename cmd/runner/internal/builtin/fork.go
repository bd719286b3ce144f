package builtin

import (
	"fmt"
	"os"
	"strconv"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
)

// nextAnchor returns the anchor of the last block of the next message of the transcript: the number of messages
// including that one.
func nextAnchor(said *Transcript) string { return strconv.Itoa(len(said.Messages()) + 1) }

// forkedSessionID returns the id of the new agent session of a launch with a Fork.
func forkedSessionID(l agent.Launch) string { return "agt-" + transcript.ForkID(l) }

// sessionToResume returns the id of the agent session to resume, "" for a new one. For a launch with a Fork it first
// copies the transcript up to the anchor's message. If the copy cannot be made, none is left, and OpenSession reports
// that the conversation is lost.
func sessionToResume(l agent.Launch) (string, error) {
	if l.Resume == "" || l.Fork == nil {
		return l.Resume, nil
	}
	to, err := transcriptPath(l.State, forkedSessionID(l))
	if err != nil {
		return "", err
	}
	from, err := transcriptPath(l.State, l.Resume)
	if err != nil {
		return "", nil //nolint:nilerr // see above
	}
	messages := 0
	err = transcript.Copy(from, to, l.Fork.Anchor, func(line transcript.Line) (transcript.Line, transcript.LineAction) {
		if messages++; strconv.Itoa(messages) == l.Fork.Anchor {
			return line, transcript.KeepLineAndStop
		}
		return line, transcript.KeepLine
	})
	if err == nil {
		return forkedSessionID(l), nil
	}
	if _, missing := os.Lstat(to); missing == nil {
		return "", fmt.Errorf("remove the copy of an earlier attempt: %w", err)
	}
	return "", nil
}

// whyNotResumable returns the reason why the conversation of a launch cannot be forked, or "" if it can.
func whyNotResumable(l agent.Launch) string {
	if l.Resume == "" || l.Fork == nil {
		return ""
	}
	if path, err := transcriptPath(l.State, forkedSessionID(l)); err == nil {
		if _, err := os.Lstat(path); err == nil {
			return ""
		}
	}
	if l.Fork.Anchor != "" {
		return fmt.Sprintf("session %.100s has no transcript here with the message %.100q", l.Resume, l.Fork.Anchor)
	}
	return fmt.Sprintf("session %.100s has no transcript here", l.Resume)
}
