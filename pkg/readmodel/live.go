// Package readmodel is what the projector writes and the gateways read: the
// schema of the read models in Postgres, and the batches announced on LIVE.
package readmodel

import "github.com/spoolhq/spool/pkg/events"

// Live is one message on LIVE, sent after its rows were committed: what a
// client sees, a reload shows too. It stays under 1 MB; a larger batch is sent
// as several, and an event too large for one is announced by Tip alone.
type Live struct {
	Session string         `json:"sessionId"`
	Tip     uint32         `json:"tip"`    // seq of the last event that Postgres has
	Events  []events.Wire  `json:"events"` // kept events, ascending by seq, without a gap inside the message
	Deltas  []events.Delta `json:"deltas"` // text in flight that was newly stored, in order of offset for each block
}

// Started is announced on topology.CtlProjector when a projector begins to read
// a group: what its predecessor committed may not have been announced on LIVE,
// so whoever follows a session of the group looks for holes.
type Started struct {
	Group int `json:"group"`
}
