package gateway_test

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// sessions is a minimal session service that answers commands.
type sessions struct {
	w    *world
	seen atomic.Int64

	mu      sync.Mutex
	done    map[string]command.Answer // by command id
	all     []command.Command
	silence bool                                 // accepts commands and does not answer
	answer  *command.Answer                      // if not nil, the answer to every command
	refuse  func(command.Command) *command.Error // nil refuses nothing
}

// serveCommands runs a session service until the test ends.
func (w *world) serveCommands() *sessions {
	w.t.Helper()
	return w.serve(topology.SessionCommandsConsumer())
}

// serveSkills runs the same service as the skills service.
func (w *world) serveSkills() *sessions {
	w.t.Helper()
	return w.serve(topology.SkillsCommandsConsumer())
}

func (w *world) serve(d topology.Durable) *sessions {
	w.t.Helper()
	s := &sessions{w: w, done: map[string]command.Answer{}}
	consumer, err := w.js.CreateOrUpdateConsumer(w.t.Context(), d.Stream, d.Config)
	must(w.t, err)
	run, err := consumer.Consume(s.handleCommand)
	must(w.t, err)
	w.t.Cleanup(func() {
		run.Stop()
		<-run.Closed()
	})
	return s
}

func (s *sessions) handleCommand(msg jetstream.Msg) {
	var c command.Command
	if err := json.Unmarshal(msg.Data(), &c); err != nil {
		s.w.t.Errorf("command %s: %v", msg.Data(), err)
	}
	s.seen.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, c)
	if msg.Headers().Get(topology.HeaderCommandID) != c.ID {
		s.w.t.Errorf("header %s is %q, the command's id %q", topology.HeaderCommandID, msg.Headers().Get(topology.HeaderCommandID), c.ID)
	}
	a, done := s.done[c.ID]
	if !done {
		a = s.execute(c)
		if a.Error == nil {
			s.done[c.ID] = a
		}
	}
	_ = msg.DoubleAck(context.Background())
	if s.silence {
		return
	}
	if err := s.w.nc.Publish(msg.Headers().Get(topology.HeaderReply), encode(s.w.t, a)); err != nil {
		s.w.t.Errorf("reply: %v", err)
	}
}

func (s *sessions) execute(c command.Command) command.Answer {
	a := command.Answer{SessionID: c.SessionID, ExecutionID: c.ExecutionID}
	if s.answer != nil {
		return *s.answer
	}
	if s.refuse != nil {
		if a.Error = s.refuse(c); a.Error != nil {
			return a
		}
	}
	s.w.mu.Lock()
	f := s.w.sessions[c.SessionID]
	s.w.mu.Unlock()
	known := f != nil && f.tenant == c.Tenant && events.AllowsAgent(c.Agents, f.agent)
	read := func(into any) {
		if err := json.Unmarshal(c.Body, into); err != nil {
			s.w.t.Errorf("body of %s: %v", c.Type, err)
		}
	}
	create := func(b command.CreateSession) events.Event {
		slug := "default"
		if ref := reference(b.Agent); ref.Slug != "" {
			slug = ref.Slug
		}
		return events.Event{Data: events.SessionCreated{Agent: slug, AgentVersion: "1", Architecture: b.Architecture, Provider: "local", Options: b.Options, Metadata: b.Metadata,
			AgentRef: reference(b.Agent), Instance: reference(b.Instance), Environments: references(b.Environments), Transcript: b.Transcript}}
	}
	post := func(b command.PostMessage) events.Event {
		return events.Event{ExecutionID: c.ExecutionID, Data: events.MessageAccepted{
			BlockID: events.DeriveID(events.KindBlock, c.ExecutionID, "message"), Content: b.Content, Parts: b.Parts, Metadata: b.Metadata, Environment: b.Environment, Permissions: b.Permissions}}
	}
	if c.Type == command.TypeRetryDeadLetter || c.Type == command.TypeDropDeadLetter {
		return a
	}
	if a.Error = s.checkAgent(c, read); a.Error != nil {
		return a
	}
	if answer, done := s.w.applyCatalogue(c, read); done {
		return answer
	}
	switch c.Type {
	case command.TypeCreateSession:
		var b command.CreateSession
		read(&b)
		s.w.emit(c.Tenant, c.SessionID, create(b))
	case command.TypeStartExecution:
		var b command.StartExecution
		read(&b)
		s.w.emit(c.Tenant, c.SessionID, create(b.Create), post(b.Post))
	case command.TypeCreateKey:
		var b command.CreateKey
		read(&b)
		d := events.KeyCreated{KeyID: b.KeyID, Name: b.Name, Prefix: b.Prefix, SHA256: b.SHA256, Rights: b.Rights}
		if c.Actor.Kind == "key" && c.Actor.ID != "root" {
			d.CreatedBy = c.Actor.ID
		}
		if len(b.Rights.Agents) == 0 {
			d.Rights.Agents = c.Agents
		}
		s.w.addKey(c.Tenant, d)
		a.Rights = &d.Rights
		return a
	case command.TypeSetBudget:
		var b command.SetBudget
		read(&b)
		s.w.setBudget(c.Tenant, b)
		return a
	case command.TypeSetLimits:
		var b command.SetLimits
		read(&b)
		s.w.setLimits(c.Tenant, b.Limits)
		return a
	case command.TypeRemoveLimits:
		tag, err := s.w.pool.Exec(context.Background(), "DELETE FROM tenant_limits WHERE tenant = $1", c.Tenant)
		if err != nil || tag.RowsAffected() == 0 {
			a.Error = &command.Error{Code: "LIMITS_NOT_FOUND", Field: "tenant", Detail: "the tenant has no limits of its own"}
		}
		s.w.publishTenant(c.Tenant, budget.Tenant{})
		return a
	case command.TypeRemoveBudget:
		var b command.RemoveBudget
		read(&b)
		tag, err := s.w.pool.Exec(context.Background(), "DELETE FROM tenant_budgets WHERE tenant = $1 AND period = $2", c.Tenant, b.Period)
		if err != nil || tag.RowsAffected() == 0 {
			a.Error = &command.Error{Code: "BUDGET_NOT_FOUND", Field: "period", Detail: "the tenant has no such budget"}
		}
		s.w.publishBudgets(c.Tenant)
		return a
	case command.TypeRevokeKey:
		var b command.RevokeKey
		read(&b)
		tag, err := s.w.pool.Exec(context.Background(), "UPDATE keys SET revoked_at = now() WHERE tenant = $1 AND id = $2 AND ($3::text[] IS NULL OR agents <> '' AND string_to_array(agents, ',') <@ $3)",
			c.Tenant, b.KeyID, c.Agents)
		if err != nil || tag.RowsAffected() == 0 {
			a.Error = &command.Error{Code: "KEY_NOT_FOUND", Field: "keyId", Detail: "there is no such key"}
		}
		return a
	default:
		if !known {
			a.Error = &command.Error{Code: "SESSION_NOT_FOUND", Field: "sessionId", Detail: "there is no such session"}
			return a
		}
		s.change(c, read, post)
	}
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	a.Position = s.w.sessions[c.SessionID].position
	return a
}

// checkAgent returns an error for a session of an agent that the actor's key may not use.
func (s *sessions) checkAgent(c command.Command, read func(any)) *command.Error {
	var b command.StartExecution
	switch c.Type {
	case command.TypeCreateSession:
		read(&b.Create)
	case command.TypeStartExecution:
		read(&b)
	default:
		return nil
	}
	slug := "default"
	switch {
	case b.Create.Agent != "":
		slug = reference(b.Create.Agent).Slug
	case b.Create.Instance != "" && len(c.Agents) > 0: // the fake does not know the agent of an instance
		return &command.Error{Code: "INSTANCE_NOT_FOUND", Field: "instance", Detail: "there is no such agent instance"}
	}
	if events.AllowsAgent(c.Agents, slug) {
		return nil
	}
	return &command.Error{Code: "FORBIDDEN", Field: "agent", Detail: "the API key is limited to agents"}
}

func (s *sessions) change(c command.Command, read func(any), post func(command.PostMessage) events.Event) {
	var e events.Event
	switch c.Type {
	case command.TypePostMessage:
		var b command.PostMessage
		read(&b)
		e = post(b)
	case command.TypeRecoverExecution:
		var b command.RecoverExecution
		read(&b)
		e = post(command.PostMessage{Content: "again", Environment: b.Environment})
		m := e.Data.(events.MessageAccepted)
		m.RecoveredFrom = b.ExecutionID
		e.Data = m
	case command.TypeDecideApproval:
		var b command.DecideApproval
		read(&b)
		e = events.Event{ExecutionID: c.ExecutionID, Data: b.ApprovalDecided}
	case command.TypeUpdateSession:
		var b command.UpdateSession
		read(&b)
		d := events.SessionOptionsUpdated{Metadata: b.Metadata}
		if b.Options != nil {
			d.Options = *b.Options
		}
		e.Data = d
	case command.TypeInterrupt:
		e.Data = events.InterruptRequested{Control: 1}
	case command.TypeCancel:
		e = events.Event{ExecutionID: c.ExecutionID, Data: events.CancelRequested{Control: 1, Reason: "cancelled"}}
	case command.TypePause:
		e = events.Event{ExecutionID: c.ExecutionID, Data: events.PauseRequested{Control: 1}}
	case command.TypeResume:
		e = events.Event{ExecutionID: c.ExecutionID, Data: events.ResumeRequested{Control: 2}}
	case command.TypeTerminate:
		e = events.Event{ExecutionID: c.ExecutionID, Data: events.TerminateRequested{Control: 3, Reason: "terminated"}}
	case command.TypeSyncWorkspace:
		e.Data = events.SyncRequested{Sync: 1}
	case command.TypePutFile:
		var b command.PutFile
		read(&b)
		e.Data = events.FilePut{N: 1, Path: b.Path, Object: b.Object, Size: b.Size, SHA256: b.SHA256, Mode: b.Mode, Archive: b.Archive}
	case command.TypeRemoveFile:
		var b command.RemoveFile
		read(&b)
		e.Data = events.FileRemoved{N: 1, Path: b.Path}
	case command.TypeDeleteSession:
		e.Data = events.SessionDeleted{}
	default:
		s.w.t.Errorf("command of type %s", c.Type)
	}
	s.w.emit(c.Tenant, c.SessionID, e)
}

func (s *sessions) commands(t testing.TB) []command.Command {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]command.Command(nil), s.all...)
}
