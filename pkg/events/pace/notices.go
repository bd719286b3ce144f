package pace

// NoticeKind is the kind of a message that a replay sends besides events. It is the event name in SSE, and after
// "session:" the message type in a WebSocket.
type NoticeKind string

// The kinds of notices, with the type of their data.
const (
	ReplayStarted NoticeKind = "replay_started" // Started; sent first
	GapShortened  NoticeKind = "gap_shortened"  // Shortened; sent before the wait
	BlockWhole    NoticeKind = "block_whole"    // BlockWithoutDeltas; sent before the event that completes the block
	ReplayEnded   NoticeKind = "replay_ended"   // Ended; sent after the last event
)

// Notice is a message that a replay sends besides events.
type Notice struct {
	Kind NoticeKind
	Data any // Started, Shortened, BlockWithoutDeltas or Ended
}

// Started is sent first; it holds the range of the events that are replayed.
type Started struct {
	From  uint32 `json:"from"`
	To    uint32 `json:"to"`
	Tip   uint32 `json:"tip"`   // seq of the session's last event when the replay started
	Speed string `json:"speed"` // in the form of ParseSpeed
}

// Shortened announces that the replay skips a part of an idle gap.
type Shortened struct {
	Seq       uint32 `json:"seq"`       // seq of the last event before the gap
	GapMs     int64  `json:"gapMs"`     // as recorded
	LeftOutMs int64  `json:"leftOutMs"` // the skipped part of gapMs
}

// BlockWithoutDeltas announces that some or all deltas of a block are no longer stored: the missing text appears at once
// with the event that completes the block.
type BlockWithoutDeltas struct {
	Seq        uint32 `json:"seq"` // seq of the event that completes the block
	BlockID    string `json:"blockId"`
	ShownBytes int    `json:"shownBytes"` // bytes of the block's text that were replayed as deltas
}

// Ended is the notice that a replay has sent all of its events.
type Ended struct {
	Seq uint32 `json:"seq"` // seq of the last replayed event
}
