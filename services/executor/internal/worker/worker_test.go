package worker

import (
	"testing"

	"github.com/spoolhq/spool/pkg/bus/bustest"
)

// The handler is reached through the Router alone.
func TestRouted(t *testing.T) {
	t.Parallel()
	bustest.RefusesUnrouted(t, New(Config{}, Deps{}).Handle, []byte(`{"tenant":"default","session":"ses_01JGK0000000000000000000AA"}`))
}
