package command

import (
	"fmt"
	"strconv"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
)

type limitsCommand struct {
	Set limitsSet `cmd:"" help:"Set a tenant's own limits; they replace the previous ones. Requires the root key."`
	Ls  limitsLs  `cmd:"" help:"List a tenant's own limits and its usage."`
	Rm  limitsRm  `cmd:"" help:"Remove a tenant's own limits, so that the server's settings apply. Requires the root key."`
}

type limitsSet struct {
	server
	Tenant            string  `placeholder:"T" help:"The tenant; by default the caller's."`
	Slots             uint32  `placeholder:"N" help:"Concurrent turns, over all executors."`
	Sandboxes         uint32  `placeholder:"N" help:"Concurrent sandboxes on one engine."`
	Sessions          uint32  `placeholder:"N" help:"Sessions that are not deleted."`
	Streams           uint32  `placeholder:"N" help:"Open SSE, WebSocket and gRPC streams of one gateway."`
	RequestsPerSecond float64 `placeholder:"N" help:"Requests per second at one gateway."`
	RequestBurst      uint32  `placeholder:"N" help:"Size of a burst of requests at one gateway."`
	Keys              uint32  `placeholder:"N" help:"API keys that are not revoked."`
	EventsPerDay      uint64  `placeholder:"N" help:"Events that the tenant's sessions may append to the log on a UTC day."`
	EventBytesPerDay  uint64  `placeholder:"N" help:"Size of these events: the bytes of their text and data, plus 256 per event."`
	StorageBytes      uint64  `placeholder:"N" help:"Bytes that the tenant's sessions, their files and snapshots, and skills may occupy."`
}

// Run sets limits.
func (c *limitsSet) Run(a *app) error {
	l := client.TenantLimits{
		Slots: c.Slots, Sandboxes: c.Sandboxes, Sessions: c.Sessions, Streams: c.Streams, RequestsPerSecond: c.RequestsPerSecond, RequestBurst: c.RequestBurst,
		Keys: c.Keys, EventsPerDay: c.EventsPerDay, EventBytesPerDay: c.EventBytesPerDay, StorageBytes: c.StorageBytes,
	}
	if l == (client.TenantLimits{}) {
		return usage("set at least one limit, or remove the limits with spool limits rm")
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	out, err := cl.SetLimits(ctx, c.Tenant, l)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(out)
	}
	fmt.Fprintln(a.Err, "set")
	return nil
}

type limitsLs struct {
	server
	Tenant string `placeholder:"T" help:"The tenant; by default the caller's."`
}

// Run lists limits.
func (c *limitsLs) Run(a *app) error {
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	out, err := cl.Limits(ctx, c.Tenant)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(out)
	}
	rows := func(yield func(client.Doc[limitRow], error) bool) {
		for _, r := range limitRows(out.Value.Limits, out.Value.Used) {
			if !yield(client.Doc[limitRow]{Value: r}, nil) {
				return
			}
		}
	}
	return list(a, false, 0, rows, []any{"LIMIT", "OWN", "USED"}, func(r limitRow) []any { return []any{r.name, r.own, r.used} })
}

// limitRow is a line of spool limits ls.
type limitRow struct{ name, own, used string }

// limitRows returns one row per limit. A limit of 0 means the server's setting. Limits without a counter on the
// server have no usage.
func limitRows(own, used client.TenantLimits) []limitRow {
	n := func(v uint64) string {
		if v == 0 {
			return "-"
		}
		return strconv.FormatUint(v, 10)
	}
	rate := "-"
	if own.RequestsPerSecond > 0 {
		rate = strconv.FormatFloat(own.RequestsPerSecond, 'f', -1, 64)
	}
	count := func(v uint64) string { return strconv.FormatUint(v, 10) }
	return []limitRow{
		{"slots", n(uint64(own.Slots)), count(uint64(used.Slots))},
		{"sandboxes", n(uint64(own.Sandboxes)), count(uint64(used.Sandboxes))},
		{"sessions", n(uint64(own.Sessions)), count(uint64(used.Sessions))},
		{"keys", n(uint64(own.Keys)), count(uint64(used.Keys))},
		{"events-per-day", n(own.EventsPerDay), count(used.EventsPerDay)},
		{"event-bytes-per-day", n(own.EventBytesPerDay), count(used.EventBytesPerDay)},
		{"storage-bytes", n(own.StorageBytes), count(used.StorageBytes)},
		{"streams", n(uint64(own.Streams)), "-"},
		{"requests-per-second", rate, "-"},
		{"request-burst", n(uint64(own.RequestBurst)), "-"},
	}
}

type limitsRm struct {
	server
	Tenant string `placeholder:"T" help:"The tenant; by default the caller's."`
}

// Run removes limits.
func (c *limitsRm) Run(a *app) error {
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	out, err := cl.RemoveLimits(ctx, c.Tenant)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(out)
	}
	fmt.Fprintln(a.Err, "removed")
	return nil
}
