// Package storage measures how full the NATS store is and keeps a reserve free for work that must always be possible:
// ends of executions, controls and deletions (docs/adr/0047).
package storage

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	// measureInterval is the interval at which Watch.Run measures the fill level of the NATS store, and the age of a
	// measurement after which Check measures again.
	measureInterval = time.Second
	// measureTimeout is the time limit of one measurement of the store's fill level.
	measureTimeout = 2 * time.Second
)

// Room holds the size limit, the present size and the reserve of the NATS store, in bytes.
type Room struct {
	Limit   int64 // size limit of the streams; 0 or less if their account has no limit
	Used    int64 // present size of the streams
	Reserve int64 // part of Limit that is kept free
}

// Fits reports whether the reserve stays free if more bytes are written to the NATS store.
func (r Room) Fits(more int64) bool { return r.Limit <= 0 || r.Used+more <= r.Limit-r.Reserve }

// ReservedError is returned when a write would need the reserve of the NATS store.
type ReservedError struct{ Room }

func (e *ReservedError) Error() string {
	return fmt.Sprintf("the NATS store uses %d of %d bytes, and the last %d are reserved for ends, controls and deletions", e.Used, e.Limit, e.Reserve)
}

// Config configures a Watch. JetStream and Logger are required.
type Config struct {
	JetStream jetstream.JetStream
	Reserve   int // percent of the store
	Logger    *slog.Logger
}

// ReserveSettings is the setting of how much of the NATS store is reserved. Every service that writes to the store
// embeds it in its Config.
type ReserveSettings struct {
	StoreReserve int `default:"10" env:"SPOOL_STORE_RESERVE" help:"Percent of the NATS store that is reserved for ends of executions, controls and deletions. While only the reserve is left, commands that need room are refused with STORAGE_FULL, executions are not started, and the output of running executions waits. Gateways, session services and executors need the same value."`
}

// CheckReserve returns an error if percent is not a valid value of the setting store-reserve, the percentage of the
// NATS store that stays free.
func CheckReserve(percent int) error {
	if percent < 1 || percent > 90 {
		return fmt.Errorf("store-reserve: %d is not between 1 and 90 percent", percent)
	}
	return nil
}

// Watch measures the fill level of the NATS store regularly. It is safe for concurrent use.
type Watch struct {
	cfg Config

	mu   sync.Mutex
	room Room
	at   time.Time // when room was measured
	low  bool      // the state that was logged last
}

// NewWatch returns a Watch that reports an unlimited Room until Run has measured the fill level of the store once.
func NewWatch(cfg Config) *Watch { return &Watch{cfg: cfg} }

// Collectors returns the metrics of the limit, the size and the reserve of the NATS store.
func (w *Watch) Collectors() []prometheus.Collector {
	gauge := func(name, help string, value func(Room) int64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "spool_store_" + name, Help: help}, func() float64 { return float64(value(w.Room())) })
	}
	return []prometheus.Collector{
		gauge("limit_bytes", "Bytes that the NATS streams may use on disk; 0 or less if their account has no limit.", func(r Room) int64 { return r.Limit }),
		gauge("used_bytes", "Bytes that the NATS streams use on disk.", func(r Room) int64 { return r.Used }),
		gauge("reserve_bytes", "Bytes of the limit that are kept free for ends, controls and deletions.", func(r Room) int64 { return r.Reserve }),
	}
}

// Run measures the fill level of the NATS store every second until ctx ends. While NATS does not respond, the last
// measurement stays in use.
func (w *Watch) Run(ctx context.Context) error {
	tick := time.NewTicker(measureInterval)
	defer tick.Stop()
	for {
		if err := w.measure(ctx); err != nil && ctx.Err() == nil {
			w.cfg.Logger.Debug("read fill level of the NATS store", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (w *Watch) measure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	info, err := w.cfg.JetStream.AccountInfo(ctx)
	if err != nil {
		return err
	}
	room := Room{Limit: info.Limits.MaxStore, Used: int64(info.Store)} //nolint:gosec // bytes of a disk
	if room.Limit > 0 {
		room.Reserve = room.Limit / 100 * int64(w.cfg.Reserve)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if low := !room.Fits(0); low != w.low {
		w.low = low
		w.cfg.Logger.Warn("fill level of the NATS store changed", "reserveOnly", low, "used", room.Used, "limit", room.Limit, "reserve", room.Reserve)
	}
	w.room, w.at = room, time.Now()
	return nil
}

// Room returns the last measurement of the fill level of the NATS store.
func (w *Watch) Room() Room {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.room
}

// IsLow reports whether only the reserve of the NATS store was free at the last measurement. A nil Watch reports false.
func (w *Watch) IsLow() bool { return w != nil && !w.Room().Fits(0) }

// Check returns a *ReservedError if the reserve of the NATS store would not stay free after more bytes are written. If
// little more than the reserve is free, Check measures again, so that many writers together cannot use up the reserve
// between two measurements. A nil Watch returns nil.
func (w *Watch) Check(ctx context.Context, more int64) error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	room, at := w.room, w.at
	w.mu.Unlock()
	if near := !room.Fits(more + room.Reserve); near || time.Since(at) > measureInterval {
		if err := w.measure(ctx); err != nil {
			w.cfg.Logger.Debug("read fill level of the NATS store", "error", err)
		}
		room = w.Room()
	}
	if !room.Fits(more) {
		return &ReservedError{room}
	}
	return nil
}
