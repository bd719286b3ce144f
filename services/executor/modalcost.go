package executor

import (
	"fmt"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events/run"
)

// checkPrice reports whether the price of Modal sandboxes is one.
func (c Config) checkPrice() error {
	if p := c.ModalSandboxPrice; p < 0 || math.IsNaN(p) || math.IsInf(p, 0) {
		return fmt.Errorf("modal-sandbox-price: %g is not a number of dollars from 0 on", p)
	}
	return nil
}

// rate returns what sandboxes cost. Those of Modal are metered, with a price or without.
func (c Config) rate() run.Rate {
	if c.Sandbox != Modal {
		return run.Rate{}
	}
	return run.Rate{Provider: Modal, USDPerSecond: c.ModalSandboxPrice}
}

// sandboxLife returns after which time the provider ends a sandbox; 0 is never.
func (c Config) sandboxLife() time.Duration {
	if c.Sandbox != Modal {
		return 0
	}
	return c.ModalTimeout
}
