package terminal

import (
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// writeSandboxNotice writes a line for an event about the sandbox or the workspace that matters to people. It ignores
// events of every turn, such as a snapshot or a file that the agent wrote.
func (r *Renderer) writeSandboxNotice(e events.Event) {
	switch d := e.Data.(type) {
	case events.SandboxReady:
		if d.Image != "" {
			r.writeNote(styleDim, "sandbox of image "+d.Image)
		}
	case events.SandboxTerminated:
		if d.Reason != "idle" { // session_idle was already shown
			r.writeNote(styleDim, "the sandbox ended ("+d.Reason+")")
		}
	case events.SandboxHealth:
		if d.Status == events.Unhealthy {
			r.writeNote(styleYellow, "the sandbox is unhealthy: "+d.Reason)
		} else {
			r.writeNote(styleDim, "the sandbox is healthy again")
		}
	case events.ExecutionPaused:
		r.writeNote(styleYellow, "⏸ paused; `spool executions resume "+e.ExecutionID+"` resumes it")
	case events.ExecutionResumed:
		r.writeNote(styleDim, "▶ resumed after "+formatMilliseconds(d.PausedMs))
	case events.FilesApplied:
		if d.Error != "" {
			r.writeNote(styleRed, "✗ not applied to the workspace: "+d.Error)
		}
	case events.WorkspaceSynced:
		if d.Reason == "requested" {
			r.writeNote(styleDim, fmt.Sprintf("snapshot of %s files", formatThousands(d.Files)))
		}
	case events.WorkspaceRestored:
		r.writeNote(styleDim, fmt.Sprintf("the workspace was restored: %s files", formatThousands(d.Files)))
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
			text += fmt.Sprintf(", %s times", formatThousands(d.Count))
		}
		r.writeNote(styleYellow, text)
	}
}
