package topology

import (
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// SessionRef is the whole content of a job, a timer or a hint to an executor: it names the session whose state the
// receiver must look at. The work to do follows from the state.
type SessionRef struct {
	Tenant  string `json:"tenant"`
	Session string `json:"session"`
}

// Encode returns the JSON of the reference, for a message that names the session.
func (r SessionRef) Encode() ([]byte, error) { return json.Marshal(r) }

// DecodeSessionRef decodes the JSON of a SessionRef and validates both ids.
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

// Lease is an executor's entry in BucketLeases, under its own id. It expires three seconds after the executor last
// renewed it.
type Lease struct {
	Executor string `json:"executor"`
	Provider string `json:"provider"`
	Engine   string `json:"engine"`
	Slots    int    `json:"slots"` // maximum number of concurrent executions
	Address  string `json:"address,omitempty"`
	// DiskLimit is the mechanism that enforces the disk limits of Docker sandboxes: loop, quota or watch. It is ""
	// while the mechanism is unknown, and for other sandboxes.
	DiskLimit string         `json:"diskLimit,omitempty"`
	Tenants   map[string]int `json:"tenants,omitempty"` // number of running executions per tenant
}

// CtlResponse is the response of an executor to a SessionRef that is sent as a request to ExecutorCtlSubject. A
// SessionRef without a reply subject is a hint that the session has a new event.
type CtlResponse struct {
	Running string `json:"running,omitempty"` // the execution of the session that the executor runs; "" for none
	Syncing bool   `json:"syncing,omitempty"` // the executor works on the session's sandbox between turns
}
