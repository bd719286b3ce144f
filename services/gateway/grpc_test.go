package gateway_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// rpc is a stream of StreamEvents.
type rpc struct {
	stream grpc.ServerStreamingClient[spoolv1.StreamEventsResponse]
	cancel context.CancelFunc
	conn   *grpc.ClientConn
}

func (s *served) conn() *grpc.ClientConn {
	s.t.Helper()
	secure := insecure.NewCredentials()
	if s.tls != nil {
		secure = credentials.NewTLS(s.tls)
	}
	conn, err := grpc.NewClient(s.grpc, grpc.WithTransportCredentials(secure))
	must(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (s *served) context(ctx context.Context) context.Context {
	if s.key == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+s.key)
}

func (s *served) rpc(session string, after uint32) *rpc {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	conn := s.conn()
	st, err := spoolv1.NewEventsClient(conn).StreamEvents(s.context(ctx), &spoolv1.StreamEventsRequest{SessionId: session, After: after})
	must(s.t, err)
	return &rpc{st, cancel, conn}
}

func (r *rpc) next() (events.WireEvent, error) {
	for {
		m, err := r.stream.Recv()
		if err != nil {
			return events.WireEvent{}, problemOf(err)
		}
		if m.GetLag() != nil {
			continue
		}
		e := m.GetEvent()
		return events.WireEvent{
			Seq: e.Seq, Position: e.Position, ID: e.GetId(), Type: events.Type(e.Type), Time: e.Time.AsTime(), SessionID: e.SessionId,
			ExecutionID: e.GetExecutionId(), ConversationID: e.GetConversationId(), Source: events.Source(e.Source), Data: json.RawMessage(e.Data.GetText()),
		}, nil
	}
}

func (r *rpc) close() {
	r.cancel()
	_ = r.conn.Close()
}

// problemOf returns the code and field of a status.
func problemOf(err error) error {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return errProblem{info.Reason, info.Metadata["field"], status.Convert(err).Message()}
		}
	}
	return err
}

func wantCode(t *testing.T, err error, grpcCode codes.Code, code, field string) {
	t.Helper()
	var p errProblem
	if !errors.As(problemOf(err), &p) || p.code != code || p.field != field || status.Code(err) != grpcCode {
		t.Errorf("got %v, want %s %s field %q", err, grpcCode, code, field)
	}
}

func TestGRPC_SharesSessionsWithREST(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveCommands()
	g := w.gateway(gateway.Config{})
	conn := g.conn()
	ctx := t.Context()
	sessions, executions := spoolv1.NewSessionsClient(conn), spoolv1.NewExecutionsClient(conn)
	const meta = `{"big":1152921504606846976}`

	keyed := metadata.AppendToOutgoingContext(ctx, "idempotency-key", "k1")
	a, err := sessions.CreateSession(keyed, &spoolv1.CreateSessionRequest{Metadata: &spoolv1.Json{Text: meta}})
	must(t, err)
	b, err := sessions.CreateSession(keyed, &spoolv1.CreateSessionRequest{Metadata: &spoolv1.Json{Text: meta}})
	must(t, err)
	if a.SessionId != b.SessionId {
		t.Errorf("one Idempotency-Key made %s and %s", a.SessionId, b.SessionId)
	}
	// The same key and request over REST yields the same session.
	if c := g.do("POST", "/api/sessions", `{"metadata": `+meta+`}`, header("Idempotency-Key", "k1")).want(t, 201); c.text("sessionId") != a.SessionId {
		t.Errorf("got %s, want %s", c, a.SessionId)
	}
	one, err := sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: a.SessionId, MinPosition: a.Position})
	must(t, err)
	if one.Metadata.GetText() != meta {
		t.Errorf("metadata came back as %s", one.Metadata.GetText())
	}
	posted, err := sessions.PostMessage(ctx, &spoolv1.PostMessageRequest{SessionId: a.SessionId, Content: "x"})
	must(t, err)
	exe, err := executions.GetExecution(ctx, &spoolv1.GetExecutionRequest{ExecutionId: posted.ExecutionId})
	must(t, err)
	if exe.SessionId != a.SessionId {
		t.Errorf("got %v", exe)
	}

	_, err = sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: oldID(t, events.KindSession)})
	wantCode(t, err, codes.NotFound, "SESSION_NOT_FOUND", "sessionId")
	_, err = sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: "ses_*"})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "sessionId")
	_, err = sessions.PostMessage(ctx, &spoolv1.PostMessageRequest{SessionId: a.SessionId, Content: "x", Metadata: &spoolv1.Json{Text: "{"}})
	wantCode(t, err, codes.InvalidArgument, "INVALID_REQUEST", "metadata")
	st, err := spoolv1.NewEventsClient(conn).StreamEvents(ctx, &spoolv1.StreamEventsRequest{SessionId: a.SessionId, After: 99})
	must(t, err)
	_, err = st.Recv()
	wantCode(t, err, codes.OutOfRange, "CURSOR_AHEAD", "after")

	health, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: "spool.v1.Sessions"})
	if err != nil || health.Status != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", health, err)
	}
	info, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	must(t, err)
	must(t, info.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "spool.v1.Sessions"}}))
	if r, err := info.Recv(); err != nil || r.GetFileDescriptorResponse() == nil {
		t.Errorf("reflection: %v, %v", r, err)
	}
	must(t, info.CloseSend())
}
