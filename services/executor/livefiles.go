package executor

import (
	"github.com/spoolhq/spool/pkg/eventlog"
	wire "github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/services/executor/internal/livefiles"
)

// serveLiveFiles answers requests of gateways for files in the engine's running sandboxes, until the returned
// server is closed.
func (e *Executor) serveLiveFiles() (*wire.Server, error) {
	source := livefiles.New(livefiles.Config{
		Sessions: eventlog.Sessions{Log: e.deps.Log}, Sandbox: e.deps.Provider, Provider: e.cfg.Sandbox, Engine: e.cfg.Engine,
	})
	return wire.Serve(e.deps.NATS, e.cfg.Sandbox, e.cfg.Engine, source, e.deps.Logger)
}
