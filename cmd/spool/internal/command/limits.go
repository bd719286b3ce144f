package command

import (
	"context"
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

type limitsCommand struct {
	Set limitsSetCommand `cmd:"" help:"Set a tenant's own limits; they replace the previous ones. Requires the root key."`
	Ls  limitsLsCommand  `cmd:"" help:"List a tenant's own limits and its usage."`
	Rm  limitsRmCommand  `cmd:"" help:"Remove a tenant's own limits, so that the server's settings apply. Requires the root key."`
}

type limitsSetCommand struct {
	tenantFlags
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

// Run replaces all limits that were set for the tenant by those of the flags. For a limit without a flag, the server's
// setting applies.
func (c *limitsSetCommand) Run(a *app) error {
	l := &spoolv1.TenantLimits{
		Slots: c.Slots, Sandboxes: c.Sandboxes, Sessions: c.Sessions, Streams: c.Streams, RequestsPerSecond: c.RequestsPerSecond, RequestBurst: c.RequestBurst,
		Keys: c.Keys, EventsPerDay: float64(c.EventsPerDay), EventBytesPerDay: float64(c.EventBytesPerDay), StorageBytes: float64(c.StorageBytes),
	}
	if proto.Size(l) == 0 {
		return usageError("set at least one limit, or remove the limits with spool limits rm")
	}
	return c.changeAndPrint(a, "set", func(ctx context.Context, cl *client.Client) (any, error) {
		return client.Call(ctx, cl.Limits.SetLimits, &spoolv1.SetLimitsRequest{Tenant: c.Tenant, Limits: l})
	})
}

type limitsLsCommand struct{ tenantFlags }

// Run prints the limits that were set for the tenant, and the usage that the server counts.
func (c *limitsLsCommand) Run(a *app) error {
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.Limits.GetLimits, &spoolv1.GetLimitsRequest{Tenant: c.Tenant})
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		return printFields(a, limitTable(doc.Value.GetLimits(), doc.Value.GetUsed())...)
	})
}

// limitTable returns a header and a row of columns for each limit. A limit of 0 means that the server's setting
// applies. Limits that the server does not count have no usage.
func limitTable(own, used *spoolv1.TenantLimits) [][]any {
	limit := func(v float64) string {
		if v == 0 {
			return "-"
		}
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return [][]any{
		{"LIMIT", "OWN", "USED"},
		{"slots", limit(float64(own.GetSlots())), used.GetSlots()},
		{"sandboxes", limit(float64(own.GetSandboxes())), used.GetSandboxes()},
		{"sessions", limit(float64(own.GetSessions())), used.GetSessions()},
		{"keys", limit(float64(own.GetKeys())), used.GetKeys()},
		{"events-per-day", limit(own.GetEventsPerDay()), formatWholeNumber(used.GetEventsPerDay())},
		{"event-bytes-per-day", limit(own.GetEventBytesPerDay()), formatWholeNumber(used.GetEventBytesPerDay())},
		{"storage-bytes", limit(own.GetStorageBytes()), formatWholeNumber(used.GetStorageBytes())},
		{"streams", limit(float64(own.GetStreams())), "-"},
		{"requests-per-second", limit(own.GetRequestsPerSecond()), "-"},
		{"request-burst", limit(float64(own.GetRequestBurst())), "-"},
	}
}

type limitsRmCommand struct{ tenantFlags }

// Run removes all limits that were set for the tenant, so that the server's settings apply.
func (c *limitsRmCommand) Run(a *app) error {
	return c.changeAndPrint(a, "removed", func(ctx context.Context, cl *client.Client) (any, error) {
		return client.Call(ctx, cl.Limits.RemoveLimits, &spoolv1.RemoveLimitsRequest{Tenant: c.Tenant})
	})
}
