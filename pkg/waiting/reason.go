// Package waiting holds the reasons for which executions wait. Executors write the reasons that they know to a bucket of
// NATS, and gateways read them there and derive the other ones from the read models and the leases.
package waiting

import "slices"

// A Reason states why an execution does not make progress.
type Reason string

// The reasons.
const (
	Approval         Reason = "approval"
	Budget           Reason = "budget"
	Disk             Reason = "disk"
	EarlierExecution Reason = "earlier_execution"
	EngineGone       Reason = "engine_gone"
	NotBefore        Reason = "not_before"
	Paused           Reason = "paused"
	Slot             Reason = "slot"
	TenantLimit      Reason = "tenant_limit"
)

// A Description describes a Reason to users.
type Description struct {
	Reason  Reason
	Meaning string
	Remedy  string // what to do
}

// Descriptions returns the descriptions of all reasons, in alphabetical order of the reasons.
func Descriptions() []Description {
	return []Description{
		{Approval, "The agent waits for the decision of a person.", "Decide the approval request: `spool approvals ls` lists the open ones."},
		{Budget, "The tenant has a budget or a daily limit of events, and its usage is not counted yet.", "If this lasts, start the session service: it counts the usage, and `spool_session_usage_lag_seconds` is its delay."},
		{Disk, "Only the reserve of the NATS store is left.", "Delete sessions, or raise the limit of the NATS store."},
		{EarlierExecution, "An earlier execution of the session has not ended.", "Wait for the end of the earlier execution, or cancel it with `spool executions cancel`."},
		{EngineGone, "No live executor can reach the sandboxes that the execution needs, or their engine does not answer.", "Start an executor for the provider and engine that `detail` names, or start the engine again."},
		{NotBefore, "The last attempt failed, and the next one is not due yet.", "Wait for the next attempt: `until` is its time. `spool events` shows why the last one failed."},
		{Paused, "A person paused the execution.", "Resume it with `spool executions resume`."},
		{Slot, "The executor has no free slot.", "Wait until another execution ends, start more executors, or raise `SPOOL_SLOTS`."},
		{TenantLimit, "The tenant has reached its limit of concurrent executions or of sandboxes.", "Wait until another execution of the tenant ends, or raise the limit with `spool limits set`."},
	}
}

// Describe returns the description of a reason, and false if there is no such reason.
func Describe(r Reason) (Description, bool) {
	all := Descriptions()
	i := slices.IndexFunc(all, func(d Description) bool { return d.Reason == r })
	if i < 0 {
		return Description{}, false
	}
	return all[i], true
}
