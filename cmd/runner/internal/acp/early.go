package acp

import (
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// earlyText is the text of a turn that the agent reported in notices (EarlyTextPiece) and has not repeated in updates yet.
type earlyText struct {
	unrepeated map[textBlockKey]string
	closed     bool // further notices are ignored: they would not continue the text
}

// textBlockKey identifies a text of the main agent by its kind and by the id of its message.
type textBlockKey struct {
	kind    events.BlockKind
	message string
}

// appendEarlyText journals a piece of text that the agent reports in a notice, before the update with the same text. It
// ignores pieces that arrive after a call of a tool, or after an update whose text no notice had: they could be out of
// order.
func (s *session) appendEarlyText(x EarlyTextPiece, t *agent.Turn) error {
	if !s.pending || len(s.calls) > 0 {
		s.early.closed = true
	}
	if s.early.closed || x.Piece == "" {
		return nil
	}
	key := textBlockKey{events.KindAssistantText, x.Message}
	if x.Thought {
		key.kind = events.KindThinking
	}
	if s.early.unrepeated == nil {
		s.early.unrepeated = map[textBlockKey]string{}
	}
	s.early.unrepeated[key] += x.Piece
	return s.appendText(s.main, key.kind, messageChunk{MessageID: x.Message, Content: contentBlock{Type: "text", Text: x.Piece}}, t)
}

// unreportedPart returns the part of piece, the text of an update, that no notice has reported and that is therefore not
// journaled yet. piece must not be empty. The updates repeat the text of the notices in the same order, but the agent
// may leave out an update.
func (e *earlyText) unreportedPart(key textBlockKey, piece string) string {
	reported := e.unrepeated[key]
	if _, after, found := strings.Cut(reported, piece); found { // the agent left out what is before it
		e.unrepeated[key] = after
		return ""
	}
	delete(e.unrepeated, key)
	e.closed = true
	if rest, ok := strings.CutPrefix(piece, reported); ok {
		return rest
	}
	return piece
}
