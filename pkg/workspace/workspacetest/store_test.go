package workspacetest_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

func TestMemory_PassesTheSuite(t *testing.T) {
	t.Parallel()
	workspacetest.Exercise(t, func(*testing.T) workspace.Store { return &workspacetest.MemoryStore{} })
}
