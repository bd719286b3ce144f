package events

// TenantLimits limits what a tenant may store and run at the same time. A field of 0 means the setting of the
// service that enforces the limit.
type TenantLimits struct {
	Slots             uint32  `json:"slots,omitempty"`             // concurrent turns, over all executors
	Sandboxes         uint32  `json:"sandboxes,omitempty"`         // concurrent sandboxes on one engine
	Sessions          uint32  `json:"sessions,omitempty"`          // sessions that are not deleted
	Streams           uint32  `json:"streams,omitempty"`           // open SSE, WebSocket and gRPC streams of one gateway
	RequestsPerSecond float64 `json:"requestsPerSecond,omitempty"` // at one gateway
	RequestBurst      uint32  `json:"requestBurst,omitempty"`      // size of a burst of requests at one gateway
	Keys              uint32  `json:"keys,omitempty"`              // API keys that are not revoked
	EventsPerDay      uint64  `json:"eventsPerDay,omitempty"`      // events that the tenant's sessions may append to the log on a UTC day
	EventBytesPerDay  uint64  `json:"eventBytesPerDay,omitempty"`  // size of these events: the bytes of their text and data, plus 256 per event
	StorageBytes      uint64  `json:"storageBytes,omitempty"`      // bytes that sessions, their files and snapshots, and skills occupy
}

// CodeTenantStorage is the error code of a request that is rejected because the tenant has reached StorageBytes.
const CodeTenantStorage = "TENANT_STORAGE"

// CodeTenantEvents is the error code of a request that is rejected, and of an execution that fails, because the
// tenant's sessions have reached EventsPerDay or EventBytesPerDay on this day.
const CodeTenantEvents = "TENANT_EVENTS"

// LimitsSubject returns the log subject of a tenant's limits.
func LimitsSubject(tenant string) Subject {
	return Subject{Tenant: tenant, ID: CatalogueID(LimitsAspect, tenant, "", "", ""), Aspect: LimitsAspect}
}

// TenantLimitsSet sets a tenant's limits and replaces the previous ones.
type TenantLimitsSet struct {
	Tenant string       `json:"tenant"`
	Limits TenantLimits `json:"limits"` // at least one field is not 0
}

// TenantLimitsRemoved removes a tenant's own limits.
type TenantLimitsRemoved struct {
	Tenant string `json:"tenant"`
}
