package events

// TenantLimits bounds what a tenant may hold and do at once. A field that is 0
// means the setting of the service that enforces it.
type TenantLimits struct {
	Slots             uint32  `json:"slots,omitempty"`             // turns that run at once, over all executors
	Sandboxes         uint32  `json:"sandboxes,omitempty"`         // sandboxes that exist at once on one engine
	Sessions          uint32  `json:"sessions,omitempty"`          // sessions that are not deleted
	Streams           uint32  `json:"streams,omitempty"`           // SSE, WebSocket and gRPC streams that are open at one gateway
	RequestsPerSecond float64 `json:"requestsPerSecond,omitempty"` // at one gateway
	RequestBurst      uint32  `json:"requestBurst,omitempty"`      // requests that may come at once, at one gateway
	Keys              uint32  `json:"keys,omitempty"`              // API keys that are not revoked
	EventsPerDay      uint64  `json:"eventsPerDay,omitempty"`      // events that the tenant's sessions may add to the log on a UTC day
	EventBytesPerDay  uint64  `json:"eventBytesPerDay,omitempty"`  // bytes of those events, of their text and data, and 256 for each
	StorageBytes      uint64  `json:"storageBytes,omitempty"`      // bytes that sessions, their files and snapshots, and skills take
}

// CodeTenantStorage is the code of a request that is refused since the tenant stores as many bytes as StorageBytes allows.
const CodeTenantStorage = "TENANT_STORAGE"

// CodeTenantEvents is the code of a request that is refused, and of an execution that fails, since the tenant's sessions have added as
// much to the log on a day as EventsPerDay and EventBytesPerDay allow.
const CodeTenantEvents = "TENANT_EVENTS"

// LimitsOf is the subject of a tenant's limits.
func LimitsOf(tenant string) Subject {
	return Subject{Tenant: tenant, ID: CatalogueID(LimitsAspect, tenant, "", "", ""), Aspect: LimitsAspect}
}

// TenantLimitsSet gives a tenant limits, in place of the former ones.
type TenantLimitsSet struct {
	Tenant string       `json:"tenant"`
	Limits TenantLimits `json:"limits"` // at least one field is not 0
}

// TenantLimitsRemoved ends a tenant's own limits.
type TenantLimitsRemoved struct {
	Tenant string `json:"tenant"`
}
