// Package readmodel defines the read models that the projector writes and the gateways read: their schema in
// Postgres, and the messages announced on LIVE.
package readmodel

import "github.com/spoolhq/spool/pkg/events"

// LiveMessage announces new events of a session to gateways, on the session's subject of topology.LiveFilter. The
// projector sends it after it has committed the rows of the events, so that a client that then reads Postgres sees at
// least the same events. A message is smaller than 1 MB: the projector splits a larger batch into several messages, and
// for an event that is too large for one message it sends only the seq, as Tip.
type LiveMessage struct {
	Session string             `json:"sessionId"`
	Tip     uint32             `json:"tip"`    // seq of the last event that Postgres has
	Events  []events.WireEvent `json:"events"` // stored events, ascending by seq, without a gap in the message
}

// ChangesToken stands in place of a session in the subject of LIVE on which the projector announces that lists of a tenant's sessions show something
// new. The message is empty: gateways read the changes from Postgres.
const ChangesToken = "changes"

// ProjectorStarted is the message that a projector sends on topology.ProjectorStartSubject when it starts to lead a group. Its
// predecessor may not have announced all commits on LIVE, so gateways compare their sessions of the group with the read
// models.
type ProjectorStarted struct {
	Group int `json:"group"`
}
