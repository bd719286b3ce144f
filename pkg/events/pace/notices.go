package pace

// NoticeKind names what a replay tells its client beside events: the event name of SSE, and after "session:" the message
// type of a WebSocket.
type NoticeKind string

// The kinds of notices.
const (
	ReplayStarted NoticeKind = "replay_started" // Started, before all else
	GapShortened  NoticeKind = "gap_shortened"  // Shortened, before the wait
	BlockWhole    NoticeKind = "block_whole"    // Whole, before the event that completes the block
	ReplayEnded   NoticeKind = "replay_ended"   // Ended, after the last event
)

// Notice is what a replay tells its client beside events.
type Notice struct {
	Kind NoticeKind
	Data any // Started, Shortened, Whole or Ended
}

// Started says which events are replayed.
type Started struct {
	From  uint32 `json:"from"`
	To    uint32 `json:"to"`
	Tip   uint32 `json:"tip"`   // seq of the session's last event when the replay began
	Speed string `json:"speed"` // as ParseSpeed reads it
}

// Shortened says that the replay leaves out a part of an idle gap.
type Shortened struct {
	Seq       uint32 `json:"seq"`       // of the last event before the gap
	GapMs     int64  `json:"gapMs"`     // as recorded
	LeftOutMs int64  `json:"leftOutMs"` // of gapMs
}

// Whole says that the text in flight of a block is no longer kept, or not all of it: the block appears whole with its end.
type Whole struct {
	Seq        uint32 `json:"seq"` // of the event that completes the block
	BlockID    string `json:"blockId"`
	ShownBytes int    `json:"shownBytes"` // of the block's text that was replayed in flight
}

// Ended says that all events were replayed.
type Ended struct {
	Seq uint32 `json:"seq"` // of the last event that was replayed
}
