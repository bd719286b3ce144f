package api

import (
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// executionPermissions validates the permissions that a message sets for its execution, and converts them to those of
// the log.
func executionPermissions(m *spoolv1.ExecutionPermissions) (events.ExecutionPermissions, error) {
	p := events.ExecutionPermissions{Unattended: m.GetUnattended()}
	for _, r := range m.GetRules() {
		p.Rules = append(p.Rules, events.PermissionRule{Tool: r.GetTool(), Command: r.GetCommand(), Path: r.GetPath(), Host: r.GetHost(), Then: r.GetThen()})
	}
	if wrong := permission.CheckExecution(p); len(wrong) > 0 {
		return p, problem.Invalid(wrong[0].Field, "%s", wrong[0].Detail)
	}
	return p, nil
}
