package terminal

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// writeEnvironment writes a line for events of the sandbox and the workspace that matter to people. Events of every turn
// (a snapshot, a file that the agent wrote) are omitted: the blocks of the agent's tools show them.
func (r *Renderer) writeEnvironment(e events.Event) {
	switch d := e.Data.(type) {
	case events.SandboxReady:
		if d.Image != "" {
			r.note(dim, "sandbox of image "+d.Image)
		}
	case events.SandboxTerminated:
		if d.Reason != "idle" { // session_idle was already shown
			r.note(dim, "the sandbox ended ("+d.Reason+")")
		}
	case events.SandboxHealth:
		if d.Status == events.Unhealthy {
			r.note(yellow, "the sandbox is unhealthy: "+d.Reason)
		} else {
			r.note(dim, "the sandbox is healthy again")
		}
	case events.ExecutionPaused:
		r.note(yellow, "⏸ paused; `spool executions resume "+e.ExecutionID+"` resumes it")
	case events.ExecutionResumed:
		r.note(dim, "▶ resumed after "+ms(d.PausedMs))
	case events.FilesApplied:
		if d.Error != "" {
			r.note(red, "✗ not applied to the workspace: "+d.Error)
		}
	case events.WorkspaceSynced:
		if d.Reason == "requested" {
			r.note(dim, fmt.Sprintf("snapshot of %s files", thousands(d.Files)))
		}
	case events.WorkspaceRestored:
		r.note(dim, fmt.Sprintf("the workspace was restored: %s files", thousands(d.Files)))
	case events.EgressDenied:
		host := d.Host
		if d.Port != 0 {
			host = fmt.Sprintf("%s:%d", host, d.Port)
		}
		if d.Code == "METHOD_NOT_ALLOWED" {
			host = d.Method + " " + host
		}
		text := "network: " + host + " refused (" + d.Code + ")"
		if d.Count > 1 {
			text += fmt.Sprintf(", %s times", thousands(d.Count))
		}
		r.note(yellow, text)
	}
}
