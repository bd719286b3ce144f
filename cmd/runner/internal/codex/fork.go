package codex

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
)

// nestedItemPrefix is the prefix of the ids of items that the CLI's tool `exec` creates. Their results are a part of the result of that tool, which
// comes later.
const nestedItemPrefix = "exec-"

// itemAnchor returns the anchor of the block for a completed item: the id of its turn and the id of the item; "" if a fork cannot cut after the
// item. A fork can cut after a message and after the result of a call. It cannot cut after a thought alone: the model's service requires the item
// that follows it.
func (s *session) itemAnchor(n notification, i threadItem) string {
	_, call := i.toolCallBlock()
	if n.ThreadID != s.thread || n.TurnID == "" || i.Type != "agentMessage" && !call || strings.HasPrefix(i.ID, nestedItemPrefix) {
		return ""
	}
	return n.TurnID + "/" + i.ID
}

// copyForkedTranscript copies the transcript of the thread to fork, cut after the anchor, under the id of the new thread. The CLI's own thread/fork
// can cut only between turns. If there is no transcript, or no anchor in it, no copy is left, and OpenSession reports that the conversation is
// lost.
func copyForkedTranscript(l agent.Launch) error {
	if l.Fork.Provided {
		return copyProvidedTranscript(l)
	}
	from, err := Adapter{}.TranscriptPath(l.Folders, l.Resume)
	if err != nil {
		return nil //nolint:nilerr // see above
	}
	c := transcriptCutter{from: l.Resume, to: transcript.ForkID(l)}
	c.turn, c.item, _ = strings.Cut(l.Fork.Anchor, "/")
	return copyIfPresent(from, strings.TrimSuffix(from, l.Resume+".jsonl")+c.to+".jsonl", l.Fork.Anchor, c.cutLine)
}

// copyIfPresent is transcript.Copy, except that a missing transcript or anchor is not an error: the copy then does not exist.
func copyIfPresent(from, to, anchor string, edit transcript.EditLine) error {
	if err := transcript.Copy(from, to, anchor, edit); err != nil {
		if _, missing := os.Lstat(to); missing == nil {
			return fmt.Errorf("remove the copy of an earlier attempt: %w", err)
		}
	}
	return nil
}

// lostThreadReason returns the reason why the thread of a launch cannot be resumed, for the error event TRANSCRIPT_LOST.
func lostThreadReason(l agent.Launch) string {
	if l.Fork != nil && l.Fork.Anchor != "" {
		return fmt.Sprintf("session %.100s of Codex has no transcript here with the item %.100q", l.Resume, l.Fork.Anchor)
	}
	return fmt.Sprintf("session %.100s of Codex has no transcript here", l.Resume)
}

// transcriptEntry is a line of the CLI's transcript.
type transcriptEntry struct {
	Type    string `json:"type"`
	Payload struct {
		Type   string `json:"type"`
		ID     string `json:"id"`
		CallID string `json:"call_id"`
		TurnID string `json:"turn_id"` // of turn_context and event_msg
		Item   struct {
			ID string `json:"id"`
		} `json:"item"` // event_msg item_completed
	} `json:"payload"`
}

// transcriptCutter cuts a transcript after an item and gives the copy another thread id.
type transcriptCutter struct {
	from, to   string // the ids of the threads
	turn, item string // of the anchor

	now     string          // the turn that the lines belong to
	open    map[string]bool // calls of the anchor's turn that have no output yet
	due     map[string]bool // the open calls that had ended at the anchor
	late    map[string]bool // the open calls that ended after the anchor
	ended   bool            // the anchor's item has ended
	written bool            // the model's entry for the anchor's item was written
}

// cutLine keeps the lines with what the agent knew at the anchor. It is a transcript.EditLine. The line of the anchor's item is not the last line
// to keep: that line comes before the entry that the model sees, and the outputs of parallel calls are in the order of the calls, not of their
// ends. Outputs of calls that ended after the anchor are dropped.
func (c *transcriptCutter) cutLine(raw transcript.Line) (transcript.Line, transcript.LineAction) {
	var e transcriptEntry
	if json.Unmarshal(raw, &e) != nil {
		return raw, transcript.KeepLine
	}
	p := e.Payload
	switch {
	case e.Type == "session_meta":
		return c.replaceThreadID(raw), transcript.KeepLine
	case c.item == "":
	case e.Type == "turn_context", p.Type == "task_started":
		if c.now = p.TurnID; c.now == c.turn && c.open == nil {
			c.open, c.due, c.late = map[string]bool{}, map[string]bool{}, map[string]bool{}
		}
	case c.now != c.turn:
	case p.Type == "item_completed":
		c.recordItemEnd(p.Item.ID)
	case e.Type == "response_item":
		return raw, c.modelEntryAction(e)
	}
	return raw, transcript.KeepLine
}

// recordItemEnd records that an item has ended, before or after the anchor.
func (c *transcriptCutter) recordItemEnd(item string) {
	switch {
	case c.open[item] && !c.ended:
		c.due[item] = true
	case c.open[item]:
		c.late[item] = true
	}
	c.ended = c.ended || item == c.item
}

// modelEntryAction returns whether to keep a transcript line that is an entry of the model's own conversation.
func (c *transcriptCutter) modelEntryAction(e transcriptEntry) transcript.LineAction {
	p := e.Payload
	switch output := strings.HasSuffix(p.Type, "_output"); {
	case output && c.late[p.CallID]:
		return transcript.DropLine
	case output:
		delete(c.open, p.CallID)
		delete(c.due, p.CallID)
		c.written = c.written || p.CallID == c.item
	case p.CallID != "":
		c.open[p.CallID] = true
	default:
		c.written = c.written || p.ID == c.item
	}
	if c.written && len(c.due) == 0 {
		return transcript.KeepLineAndStop
	}
	return transcript.KeepLine
}

// replaceThreadID returns the first line of a transcript with the id of the copy's thread.
func (c *transcriptCutter) replaceThreadID(raw transcript.Line) transcript.Line {
	var meta, payload map[string]json.RawMessage
	if json.Unmarshal(raw, &meta) != nil || json.Unmarshal(meta["payload"], &payload) != nil {
		return raw
	}
	for _, key := range []string{"id", "session_id"} {
		if string(payload[key]) == `"`+c.from+`"` {
			payload[key] = json.RawMessage(`"` + c.to + `"`)
		}
	}
	encoded, err := json.Marshal(payload)
	if err != nil {
		return raw // parsed JSON always marshals
	}
	meta["payload"] = encoded
	if encoded, err = json.Marshal(meta); err != nil {
		return raw
	}
	return encoded
}
