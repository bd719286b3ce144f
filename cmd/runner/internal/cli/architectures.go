package cli

import (
	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/cmd/runner/internal/claudecode"
	"github.com/spoolhq/spool/cmd/runner/internal/codex"
	"github.com/spoolhq/spool/cmd/runner/internal/opencode"
)

// Architectures returns the adapters of all agents that this runner can run, by the name of their architecture.
func Architectures() map[string]agent.Adapter {
	return map[string]agent.Adapter{
		builtin.Architecture:    builtin.Adapter{},
		claudecode.Architecture: claudecode.Adapter{},
		codex.Architecture:      codex.Adapter{},
		acp.Architecture:        acp.Adapter{},
		opencode.Architecture:   opencode.Adapter{},
	}
}
