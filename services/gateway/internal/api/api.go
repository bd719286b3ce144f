// Package api implements the services of spool.v1. gRPC calls it directly; REST calls it in the same process.
package api

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/spoolhq/spool/pkg/api/command"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/changes"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/dead"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/objects"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/quota"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/replay"
	"github.com/spoolhq/spool/services/gateway/internal/signin"
	"github.com/spoolhq/spool/services/gateway/internal/waits"
)

// Limits of application data, in bytes.
const (
	MaxMessageBytes  = 1 << 20
	MaxMetadataBytes = 16 << 10
)

// IdempotencyHeader is the name of the header Idempotency-Key as gRPC metadata.
const IdempotencyHeader = "idempotency-key"

// Server implements all services of spool.v1. Every field except Sealer is required.
type Server struct {
	spoolv1.UnimplementedSessionsServer
	spoolv1.UnimplementedExecutionsServer
	spoolv1.UnimplementedApprovalsServer
	spoolv1.UnimplementedEventsServer
	spoolv1.UnimplementedKeysServer
	spoolv1.UnimplementedSignInServer
	spoolv1.UnimplementedBudgetsServer
	spoolv1.UnimplementedLimitsServer
	spoolv1.UnimplementedDeadLettersServer
	spoolv1.UnimplementedAuditServer
	spoolv1.UnimplementedAgentsServer
	spoolv1.UnimplementedInstancesServer
	spoolv1.UnimplementedEnvironmentsServer
	spoolv1.UnimplementedSkillsServer

	Reads   *reads.Store
	Waits   *waits.Finder
	Send    *commands.Sender
	Live    *live.Hub
	Player  *replay.Player
	Objects *objects.Store // content of workspaces
	Files   *livefiles.Client
	Skills  *objects.Store // skill ZIPs
	Sealer  Sealer         // nil refuses secrets
	Dead    *dead.Letters
	Quota   *quota.Quota
	Auth    *auth.Authenticator
	SignIn  *signin.Store

	Failures *signin.Failures

	Admission *admission.Admission

	// AwaitBudget blocks until the services that enforce a tenant's budget have received it.
	AwaitBudget func(ctx context.Context, tenant string, p events.Period, limit events.Budget) error
	// SessionLimit returns how many sessions a tenant may have; 0 means no limit.
	SessionLimit func(tenant string) int
	newSessions  uncountedSessions
	// AwaitLimits blocks until the services that enforce a tenant's limits have received them.
	AwaitLimits  func(ctx context.Context, tenant string, l events.TenantLimits) error
	Changes      *changes.Hub
	Watch        *auth.KeyWatch
	Now          func() time.Time
	Entropy      io.Reader
	WriteTimeout time.Duration // maximum time that a client may take to read one batch of StreamEvents or ReplayEvents, or the final status of WatchExecution
	Metrics      StreamMetrics
}

// StreamMetrics counts the streams of StreamEvents, ReplayEvents and WatchExecution, and requests that wait for the
// end of an execution.
type StreamMetrics interface {
	BeginStream(kind string) (done func())
	CountSent(kind string, bytes int)
	CountCut(kind, code string)
}

// idempotencyKey returns the Idempotency-Key of a request, or "" if there is none.
func idempotencyKey(ctx context.Context) (string, error) {
	list := metadata.ValueFromIncomingContext(ctx, IdempotencyHeader)
	switch {
	case len(list) == 0:
		return "", nil
	case len(list) > 1 || list[0] == "":
		return "", problem.Invalid("Idempotency-Key", "the header must be set once and not be empty")
	}
	return list[0], nil
}

// sendCreateCommand sends a command that creates something, such as a session, on behalf of the caller. The request's
// Idempotency-Key identifies repeats. It returns the answer of the service; the error is a *problem.Error.
func (s *Server) sendCreateCommand(ctx context.Context, r commands.Request) (command.Answer, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return command.Answer{}, err
	}
	if r.Key, err = idempotencyKey(ctx); err != nil {
		return command.Answer{}, err
	}
	r.Principal = p
	return s.Send.Send(ctx, r)
}

// sendChangeCommand sends a command that changes something that exists, on behalf of the caller, and returns the
// answer of the service. A repeat of the command has no effect, so it needs no Idempotency-Key.
func (s *Server) sendChangeCommand(ctx context.Context, r commands.Request) (command.Answer, error) {
	p, err := auth.From(ctx)
	if err != nil {
		return command.Answer{}, err
	}
	r.Principal = p
	return s.Send.Send(ctx, r)
}

// checkSession returns a problem unless id is that of a session that the caller may see, and then blocks until the
// read models have reached minPosition. It returns the caller's tenant.
func (s *Server) checkSession(ctx context.Context, id, minPosition string) (tenant string, err error) {
	p, err := auth.From(ctx)
	if err != nil {
		return "", err
	}
	if err := reads.CheckSessionID(id); err != nil {
		return "", err
	}
	if err := s.Reads.CheckVisible(ctx, p.Tenant, id, p.Agents); err != nil {
		return "", err
	}
	return p.Tenant, s.Reads.AwaitMinPosition(ctx, id, minPosition)
}

// checkMetadataSize returns a problem if the application's metadata in a request is too large.
func checkMetadataSize(m *spoolv1.Json) error {
	if n := len(m.GetText()); n > MaxMetadataBytes {
		return problem.New(problem.PayloadTooLarge, "metadata", tooLargeDetail("the metadata", n, MaxMetadataBytes))
	}
	return nil
}

// sessionOptions converts the session options of a request to those of the log. Its error names an invalid budget.
func sessionOptions(o *spoolv1.SessionOptions) (events.Options, error) {
	budget, err := parseBudget("sessionOptions.budget", o.GetBudget())
	return events.Options{
		Model: o.GetModel(), ModelProvider: o.GetModelProvider(), ModelSettings: modelSettings(o.GetModelSettings()), IdleTimeoutMs: o.GetIdleTimeoutMs(), TurnLimitMs: o.GetTurnLimitMs(), SessionLimitMs: o.GetSessionLimitMs(),
		SyncIntervalMs: o.GetSyncIntervalMs(), HealthIntervalMs: o.GetHealthIntervalMs(), SandboxMaxAgeMs: o.GetSandboxMaxAgeMs(),
		Image: o.GetImage(), Command: o.GetCommand(), Egress: o.GetEgress(), Budget: budget, HostPath: o.GetHostPath(),
		OnConversationLoss: o.GetOnConversationLoss(),
	}, err
}

// modelSettings converts the model settings of a request to those of the log.
func modelSettings(s *spoolv1.ModelSettings) events.ModelSettings {
	return events.ModelSettings{Preset: s.GetPreset(), Env: s.GetEnv(), Args: s.GetArgs()}
}

// commandProblem converts a *command.Error to a problem. It returns other errors unchanged.
func commandProblem(err error) error {
	var refused *command.Error
	if errors.As(err, &refused) {
		return problem.New(problem.Code(refused.Code), refused.Field, refused.Detail)
	}
	return err
}

// rawJSON returns the text of a JSON value, nil if it is absent.
func rawJSON(m *spoolv1.Json) []byte {
	if m == nil {
		return nil
	}
	return []byte(m.GetText())
}
