package cli

import (
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/cmd/runner/internal/claudecode"
)

// Architectures are the agents that this runner can run.
func Architectures() map[string]agent.Adapter {
	return map[string]agent.Adapter{
		builtin.Architecture:    builtin.Adapter{},
		claudecode.Architecture: claudecode.Adapter{},
	}
}
