package topology

import (
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// SessionRef is the whole content of a job, a timer and a hint: whose state to
// look at. What is to be done follows from the state.
type SessionRef struct {
	Tenant  string `json:"tenant"`
	Session string `json:"session"`
}

// Encode is the message.
func (r SessionRef) Encode() ([]byte, error) { return json.Marshal(r) }

// DecodeSessionRef reads a message and checks both ids.
func DecodeSessionRef(b []byte) (SessionRef, error) {
	var r SessionRef
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("decode session reference: %w", err)
	}
	if err := events.CheckTenant("tenant", r.Tenant); err != nil {
		return r, err
	}
	return r, events.CheckID("session", events.KindSession, r.Session)
}

// Lease is an executor's entry in BucketLeases, under its own id. It is gone
// three seconds after the executor last renewed it.
type Lease struct {
	Executor string `json:"executor"`
	Provider string `json:"provider"`
	Engine   string `json:"engine"`
	Slots    int    `json:"slots"` // how many executions it runs at once
	Address  string `json:"address,omitempty"`
	// DiskLimit is what enforces the disk limits of Docker sandboxes: loop, quota or
	// watch; "" while that is not known, and for other sandboxes.
	DiskLimit string         `json:"diskLimit,omitempty"`
	Tenants   map[string]int `json:"tenants,omitempty"` // how many executions of each tenant it runs
}

// CtlAnswer answers a question on Ctl: a request with a SessionRef. A plain
// publish of a SessionRef is a hint that the session has a new fact.
type CtlAnswer struct {
	Running string `json:"running,omitempty"` // the execution of that session that the executor runs, "" for none
	Syncing bool   `json:"syncing,omitempty"` // the executor works on the session's sandbox, in which nothing runs
}
