package command

import (
	"testing"

	"github.com/spoolhq/spool/pkg/bus/bustest"
)

// TestHandle_RefusesToRunWithoutTheRouter tests that the handler does nothing when it is called without the Router.
func TestHandle_RefusesToRunWithoutTheRouter(t *testing.T) {
	bustest.RequireUnroutedRefused(t, New(Config{}).Handle, []byte(`{"type":"interrupt"}`))
}
