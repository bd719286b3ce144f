package command

import (
	"testing"

	"github.com/spoolhq/spool/pkg/bus/bustest"
)

// TestReach: nobody gets past the Router.
func TestReach(t *testing.T) {
	bustest.RefusesUnrouted(t, New(Config{}).Handle, []byte(`{"type":"push_skill"}`))
}
