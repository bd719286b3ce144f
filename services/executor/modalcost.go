package executor

import (
	"fmt"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events/run"
)

// The bounds of ModalTimeout; the upper one is Modal's.
const (
	minModalTimeout = 10 * time.Minute
	maxModalTimeout = 24 * time.Hour
)

// checkModalCost checks the settings of what Modal sandboxes cost, and how long they live.
func (c Config) checkModalCost() error {
	if c.ModalTimeout < minModalTimeout || c.ModalTimeout > maxModalTimeout {
		return fmt.Errorf("modal-timeout: %s is not between %s and %s", c.ModalTimeout, minModalTimeout, maxModalTimeout)
	}
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
