// Package commands sends commands over COMMANDS to the service that decides them, and returns the answers.
package commands

import (
	"bytes"
	"context"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Config configures a Sender. All fields except Timeout, Try, Room, Quota, OnOutcome and OnStored are
// required.
type Config struct {
	JetStream jetstream.JetStream
	Room      *storage.Watch
	Quota     func(ctx context.Context, tenant string) error // returns an error if the tenant has reached its storage limit; may be nil
	Timeout   time.Duration                                  // of a command, including all tries; 0 means 10 s
	Try       time.Duration                                  // of one try; 0 means 3 s
	Now       func() time.Time
	Entropy   io.Reader
	Logger    *slog.Logger
	OnOutcome func(t command.Type, outcome string) // called with the outcome of each command; may be nil
	OnStored  func(id, position string)            // called with the position of a command's commit; may be nil
}

// Sender sends commands to the services that carry them out. Its errors are *problem.Error.
type Sender struct {
	cfg  Config
	keys recordStore
}

// New returns a Sender.
func New(cfg Config) *Sender {
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	if cfg.Try == 0 {
		cfg.Try = 3 * time.Second
	}
	if cfg.OnOutcome == nil {
		cfg.OnOutcome = func(command.Type, string) {}
	}
	if cfg.OnStored == nil {
		cfg.OnStored = func(string, string) {}
	}
	return &Sender{cfg: cfg, keys: recordStore{js: cfg.JetStream}}
}

// Request describes a command that a Sender sends.
type Request struct {
	Type        command.Type
	Service     string // the service to ask; "" means topology.ServiceSession
	ID          string // id of the command, if the body contains it already; "" generates one
	Principal   auth.Principal
	Tenant      string        // owner of the subject; "" means the principal's tenant
	SessionID   string        // "" generates one, for a command that creates a session
	ExecutionID string        // "" generates one, for a command that creates an execution
	About       string        // catalogue id of the subject; "" means the session
	Kind        events.Aspect // kind of catalogue entry, if the answer may name another entry than About; "" for none
	Body        any           // nil for none
	// Secrets are values that Body leaves out, but that distinguish a repeat from another request; nil for none.
	Secrets [][]byte
	// Seal returns the body to send, with Secrets sealed. It is called after Prepare, when the execution's id is
	// known. If nil, Body is sent.
	Seal func(ctx context.Context, tenant, execution string) (any, error)
	// Prepare stores what the command refers to. It is called when the session's id is known; may be nil.
	Prepare func(ctx context.Context, tenant, session string) error
	Key     string // Idempotency-Key; "" for none
	// Reserved means that the bytes which the command adds are already reserved in the tenant's quota.
	Reserved bool
	// Timeout replaces Config.Timeout and Config.Try for a command that takes long; 0 means Config.Timeout with several
	// tries.
	Timeout time.Duration
}

// Send sends a command and waits for its answer.
func (s *Sender) Send(ctx context.Context, r Request) (command.Answer, error) {
	answer, err := s.send(ctx, r)
	outcome := "ok"
	var p *problem.Error
	if errors.As(err, &p) {
		outcome = string(p.Code)
	}
	s.cfg.OnOutcome(r.Type, outcome)
	return answer, err
}

// send sends a command and returns the answer of the service. Send calls it and counts the outcome.
func (s *Sender) send(ctx context.Context, r Request) (command.Answer, error) {
	if r.Tenant == "" {
		r.Tenant = r.Principal.Tenant
	}
	body, err := encodeJSON(r.Body)
	if err != nil {
		return command.Answer{}, problem.From(err)
	}
	if r.Service == "" {
		r.Service = topology.ServiceSession
	}
	kept, name, err := s.identifyWithTimeout(ctx, r, body)
	if err != nil {
		return command.Answer{}, err
	}
	if kept.Answer != nil {
		return *kept.Answer, nil
	}
	if err := s.checkStorage(ctx, r); err != nil {
		s.releaseKey(ctx, name)
		return command.Answer{}, err
	}
	cmd := command.Command{
		Type: r.Type, ID: kept.Command, Tenant: r.Tenant, SessionID: r.SessionID, ExecutionID: r.ExecutionID, Actor: r.Principal.Actor(), Body: body, Agents: r.Principal.Agents,
	}
	if err := setNewIDs(&cmd); err != nil {
		return command.Answer{}, problem.From(err)
	}
	if err := prepareBody(ctx, r, &cmd); err != nil {
		s.releaseKey(ctx, name)
		return command.Answer{}, err
	}
	about := r.About
	if about == "" {
		about = cmd.SessionID
	}
	timeout, try := s.cfg.Timeout, s.cfg.Try
	if r.Timeout > 0 {
		timeout, try = r.Timeout, r.Timeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer, err := s.requestUntilAnswered(ctx, topology.CommandSubject(r.Service, r.Tenant, about), cmd, try)
	if err != nil {
		return command.Answer{}, s.sendErrorProblem(r, cmd, body, err)
	}
	if name != "" {
		s.storeAnswer(ctx, name, kept, answer)
	}
	if answer.Error != nil {
		return command.Answer{}, refusalProblem(answer.Error)
	}
	if r.Kind != "" && answer.Ref != nil {
		about = answer.Ref.Subject(r.Kind, r.Tenant).ID
	}
	s.cfg.OnStored(about, answer.Position)
	return answer, nil
}

// checkStorage refuses a command that stores data while only the reserve of the NATS store is left, or while the
// tenant has reached its storage limit. It is called before anything of the command is stored.
func (s *Sender) checkStorage(ctx context.Context, r Request) error {
	if !r.Type.IsRefusedWhenFull() {
		return nil
	}
	if err := s.cfg.Room.Check(ctx, 0); err != nil {
		return problem.StorageIsFull().WithCause(err)
	}
	if s.cfg.Quota == nil || r.Reserved {
		return nil
	}
	return s.cfg.Quota(ctx, r.Tenant)
}

// prepareBody stores the files and secrets to which the command of r refers, and sets the body of cmd if Request.Seal
// returns another one.
func prepareBody(ctx context.Context, r Request, cmd *command.Command) error {
	if r.Prepare != nil {
		if err := r.Prepare(ctx, cmd.Tenant, cmd.SessionID); err != nil {
			return err
		}
	}
	if r.Seal == nil {
		return nil
	}
	body, err := r.Seal(ctx, cmd.Tenant, cmd.ExecutionID)
	if err != nil {
		return err
	}
	if cmd.Body, err = encodeJSON(body); err != nil {
		return problem.From(err)
	}
	return nil
}

// storeAnswer stores an answer in the record of the request's Idempotency-Key, for repeats of the request. If the
// service refused the command, storeAnswer removes the record instead, so that a corrected request may use the key.
func (s *Sender) storeAnswer(ctx context.Context, name string, kept idempotencyRecord, answer command.Answer) {
	var err error
	if answer.Error != nil {
		err = s.keys.removeRecord(ctx, name)
	} else {
		kept.Answer = &answer
		err = s.keys.setAnswer(ctx, name, kept)
	}
	if err != nil {
		s.cfg.Logger.Warn("store answer for Idempotency-Key: a repeat will be sent to the session service again", "error", err)
	}
}

// releaseKey removes the record of an Idempotency-Key whose command was not sent, so that a corrected request may use
// the key.
func (s *Sender) releaseKey(ctx context.Context, name string) {
	if name == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeKeyTimeout)
	defer cancel()
	if err := s.keys.removeRecord(ctx, name); err != nil {
		s.cfg.Logger.Warn("release Idempotency-Key of a request that was not sent", "error", err)
	}
}

// identifyWithTimeout calls identifyRequest within the timeout of a command.
func (s *Sender) identifyWithTimeout(ctx context.Context, r Request, body []byte) (idempotencyRecord, string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return s.identifyRequest(ctx, r, body)
}

// identifyRequest returns the record of the command that a request sends and, if the request has an Idempotency-Key,
// the name of that record in the NATS bucket idempotency.
func (s *Sender) identifyRequest(ctx context.Context, r Request, body []byte) (kept idempotencyRecord, name string, err error) {
	id := r.ID
	if id == "" {
		if id, err = events.NewID(events.KindCommand, s.cfg.Now(), s.cfg.Entropy); err != nil {
			return idempotencyRecord{}, "", problem.From(err)
		}
	}
	if r.Key == "" {
		return idempotencyRecord{Command: id}, "", nil
	}
	if err := CheckIdempotencyKey(r.Key); err != nil {
		return idempotencyRecord{}, "", err
	}
	if s.isCommandID(r.Key) {
		id = r.Key
	}
	name = recordName(r, r.Key)
	request, err := requestDigest(r, name, body)
	if err != nil {
		return idempotencyRecord{}, "", problem.From(err)
	}
	kept, err = s.keys.claimKey(ctx, name, idempotencyRecord{Request: request, Command: id})
	return kept, name, err
}

// isCommandID reports whether a key is the id of a command, which a 503 returns for a command with an unknown
// outcome. An id from the distant future is treated as an ordinary key: as a command id it would cause sessions to
// read their log before each further command (see session.State.Forgotten).
func (s *Sender) isCommandID(key string) bool {
	if events.CheckID("Idempotency-Key", events.KindCommand, key) != nil {
		return false
	}
	at, ok := timeOfID(key)
	return ok && at.Before(s.cfg.Now().Add(topology.IdempotencyTTL))
}

// pbkdf2Iterations is the number of PBKDF2 iterations with which requestDigest hashes a request. They make an attacker
// who can read the idempotency bucket spend about 30 ms for each guess at a secret.
const pbkdf2Iterations = 100_000

// requestDigest returns a hash of a request that is equal only for repeats of the request. name is the name of the
// request's record, and the salt of the hash.
func requestDigest(r Request, name string, body []byte) (string, error) {
	parts := [][]byte{[]byte(r.Type), []byte(r.SessionID), []byte(r.ExecutionID), body}
	if r.Principal.User != "" {
		parts = append(parts, []byte(r.Principal.User))
	}
	if len(r.Secrets) > 0 {
		slow, err := pbkdf2.Key(sha256.New, hashParts(r.Secrets...), []byte(name), pbkdf2Iterations, sha256.Size)
		if err != nil {
			return "", err
		}
		parts = append(parts, slow)
	}
	return hashParts(parts...), nil
}

// setNewIDs sets the ids of the session and the execution that a command creates, which are derived from the
// command's id.
func setNewIDs(c *command.Command) (err error) {
	switch c.Type {
	case command.TypeCreateSession, command.TypeForkSession, command.TypeStartExecution:
		if c.SessionID != "" { // its transcript is already stored in the session's folder
			break
		}
		if c.SessionID, err = deriveID(events.KindSession, c.Tenant, c.ID); err != nil {
			return err
		}
	}
	switch c.Type {
	case command.TypePostMessage, command.TypeStartExecution, command.TypeRecoverExecution:
		c.ExecutionID, err = deriveID(events.KindExecution, c.Tenant, c.ID)
	}
	return err
}

// requestUntilAnswered sends the command until a service answers or ctx ends. All tries have the same id, so that the
// service carries the command out once, and a request survives the crash of a replica.
func (s *Sender) requestUntilAnswered(ctx context.Context, subject string, cmd command.Command, each time.Duration) (command.Answer, error) {
	payload, err := encodeJSON(cmd)
	if err != nil {
		return command.Answer{}, err
	}
	var unknown error
	for {
		try, cancel := context.WithTimeout(ctx, each)
		got, err := bus.Request(try, s.cfg.JetStream, bus.Command{Subject: subject, ID: cmd.ID, Payload: payload})
		cancel()
		if err == nil {
			var answer command.Answer
			if err := json.Unmarshal(got.Payload, &answer); err != nil {
				return answer, fmt.Errorf("decode the answer to %s: %w", cmd.ID, err)
			}
			return answer, nil
		}
		if errors.Is(err, bus.ErrOutcomeUnknown) {
			unknown = err
		} else if unknown == nil {
			return command.Answer{}, err
		}
		if ctx.Err() != nil || !errors.Is(err, bus.ErrOutcomeUnknown) {
			return command.Answer{}, errors.Join(unknown, err)
		}
	}
}

// sendErrorProblem returns the problem for the error with which requestUntilAnswered could not get an answer to a
// command.
func (s *Sender) sendErrorProblem(r Request, cmd command.Command, body []byte, err error) error {
	switch {
	case errors.Is(err, bus.ErrOutcomeUnknown):
		return s.unknownOutcomeProblem(r, cmd, body).WithCause(err)
	case errors.Is(err, bus.ErrTooLarge):
		return problem.New(problem.PayloadTooLarge, "", "the request is too large for NATS; send less at once").WithCause(err)
	case errors.Is(err, bus.ErrFull):
		return problem.New(problem.Unavailable, "", "too many commands are waiting; nothing was done, try again").WithCause(err)
	case errors.Is(err, bus.ErrNoStream):
		return problem.New(problem.Unavailable, "", "Spool's streams are not installed in NATS yet; nothing was done, try again").WithCause(err)
	case errors.Is(err, bus.ErrUnavailable):
		return problem.New(problem.Unavailable, "", "NATS does not answer; nothing was done, try again").WithCause(err)
	}
	return problem.From(err)
}

// storeKeyTimeout bounds how long the response to a request with an unknown outcome is delayed to store the request's
// key.
const storeKeyTimeout = time.Second

// unknownOutcomeProblem returns the problem for a request whose command was sent and got no answer, so that the
// gateway does not know whether the service carried it out.
func (s *Sender) unknownOutcomeProblem(r Request, cmd command.Command, body []byte) *problem.Error {
	switch r.Type {
	case command.TypeCreateSession, command.TypeForkSession, command.TypePostMessage, command.TypeStartExecution, command.TypeRecoverExecution, command.TypeDecideApproval:
	case command.TypeCreateKey:
		return problem.New(problem.Unavailable, "", "no service answered, so the outcome is unknown: the key may have been created; list the keys and revoke the one that you do not have")
	default:
		return problem.New(problem.Unavailable, "", "no service answered, so the outcome is unknown; the request can be repeated safely")
	}
	key := r.Key
	if key == "" {
		// A retry under the command's own id is the same command even without a record. The record only allows the
		// gateway to refuse another body, so failing to write it is not an error.
		key = cmd.ID
		ctx, cancel := context.WithTimeout(context.Background(), storeKeyTimeout)
		defer cancel()
		name := recordName(r, key)
		request, err := requestDigest(r, name, body)
		if err == nil {
			_, err = s.keys.claimKey(ctx, name, idempotencyRecord{Request: request, Command: cmd.ID})
		}
		if err != nil {
			s.cfg.Logger.Info("store key of a command with unknown outcome", "command", cmd.ID, "error", err)
		}
	}
	e := problem.New(problem.Unavailable, "", "no service answered, so the outcome is unknown; repeat the request with header Idempotency-Key: "+key+" and it takes effect once")
	e.IdempotencyKey = key
	return e
}

// refusalProblem converts the error with which a service refused a command to a problem.
func refusalProblem(e *command.Error) error {
	if _, known := problem.LookupCode(problem.Code(e.Code)); !known {
		return problem.New(problem.Internal, "", "a service refused the command with a code that this gateway does not know").WithCause(e)
	}
	out := problem.New(problem.Code(e.Code), e.Field, e.Detail)
	out.Tip = e.Tip
	return out
}

// encodeJSON encodes JSON without HTML escapes, so that application data stays unchanged.
func encodeJSON(v any) (json.RawMessage, error) {
	if v == nil {
		return nil, nil
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
