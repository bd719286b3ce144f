package pace

// NoticeKind is the kind of a message that a replay sends besides events. It is the event name in SSE, and after
// "session:" the message type in a WebSocket.
type NoticeKind string

// The kinds of notices, with the type of their data.
const (
	ReplayStarted NoticeKind = "replay_started" // StartedNotice; sent first
	GapShortened  NoticeKind = "gap_shortened"  // ShortenedNotice; sent before the wait
	BlockWhole    NoticeKind = "block_whole"    // BlockWholeNotice; sent before the event that completes the block
	ReplayEnded   NoticeKind = "replay_ended"   // EndedNotice; sent after the last event
)

// Notice is a message that a replay sends besides events.
type Notice struct {
	Kind NoticeKind
	Data any // StartedNotice, ShortenedNotice, BlockWholeNotice or EndedNotice
}

// StartedNotice is the first notice of a replay. It holds the range of the events that are replayed.
type StartedNotice struct {
	From  uint32 `json:"from"`
	To    uint32 `json:"to"`
	Tip   uint32 `json:"tip"`   // seq of the session's last event when the replay started
	Speed string `json:"speed"` // in the form of ParseSpeed
}

// ShortenedNotice announces that the replay skips a part of a gap between two events.
type ShortenedNotice struct {
	Seq       uint32 `json:"seq"`       // seq of the last event before the gap
	GapMs     int64  `json:"gapMs"`     // as recorded
	LeftOutMs int64  `json:"leftOutMs"` // the skipped part of gapMs
}

// BlockWholeNotice announces that some or all deltas of a block are no longer stored: the missing text appears at once
// with the event that completes the block.
type BlockWholeNotice struct {
	Seq        uint32 `json:"seq"` // seq of the event that completes the block
	BlockID    string `json:"blockId"`
	ShownBytes int    `json:"shownBytes"` // bytes of the block's text that were replayed as deltas
}

// EndedNotice announces that a replay has sent all of its events.
type EndedNotice struct {
	Seq uint32 `json:"seq"` // seq of the last replayed event
}
