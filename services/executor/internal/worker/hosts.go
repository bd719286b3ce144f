package worker

import (
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
)

// fromSession is the layer of what a session adds to its agent's hosts.
const fromSession = "session"

// hosts are what an execution's sandbox may reach beside models: what the session
// has, to which its agent's were added when it was created, then each environment's.
func hosts(session, agent []string, list []layers.Environment) ([]events.AllowedHost, error) {
	var from []egress.Layer
	for _, entry := range session {
		l := egress.Layer{From: fromSession, Entries: []string{entry}}
		if slices.Contains(agent, entry) {
			l.From = layers.FromAgent
		}
		from = append(from, l)
	}
	for _, e := range list {
		from = append(from, egress.Layer{From: e.Ref.String(), Entries: e.Spec.Egress})
	}
	all, err := egress.Union(command.MaxEgress, from...)
	if err != nil {
		return nil, &unresolved{"EGRESS_INVALID", err}
	}
	var out []events.AllowedHost
	for _, s := range all {
		out = append(out, events.AllowedHost(s))
	}
	return out, nil
}

// allow is the allowlist of the execution's sandbox.
func (r *resolution) allow() []string {
	out := make([]string, 0, len(r.Egress))
	for _, h := range r.Egress {
		out = append(out, h.Entry)
	}
	return out
}

// look finds out whether the egress proxy will look into requests.
func (r *resolution) look() error {
	list, err := egress.ParseAllowlist(r.allow())
	if err != nil {
		return &unresolved{"EGRESS_INVALID", fmt.Errorf("what the execution may reach: %w", err)}
	}
	r.selective = list.Selective()
	return nil
}
