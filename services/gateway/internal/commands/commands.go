// Package commands sends what clients ask to the service that decides it, over
// COMMANDS, and gives its answer back.
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
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Config of a Sender. All but Timeout, Try, Room, Quota, Sent and Stored are required.
type Config struct {
	JetStream jetstream.JetStream
	Room      *storage.Watch
	Quota     func(ctx context.Context, tenant string) error // refuses a tenant that stores as much as it may; nil never does
	Timeout   time.Duration                                  // of a command, with all its tries; 0 means 10 s
	Try       time.Duration                                  // of one try; 0 means 3 s
	Now       func() time.Time
	Entropy   io.Reader
	Logger    *slog.Logger
	Sent      func(t command.Type, outcome string) // counts; may be nil
	Stored    func(id, position string)            // is told where the log holds what a command wrote about an id; may be nil
}

// Sender sends commands. Its errors are *problem.Error.
type Sender struct {
	cfg  Config
	keys idempotency
}

// New makes a Sender.
func New(cfg Config) *Sender {
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	if cfg.Try == 0 {
		cfg.Try = 3 * time.Second
	}
	if cfg.Sent == nil {
		cfg.Sent = func(command.Type, string) {}
	}
	if cfg.Stored == nil {
		cfg.Stored = func(string, string) {}
	}
	return &Sender{cfg: cfg, keys: idempotency{js: cfg.JetStream}}
}

// Request is what is asked.
type Request struct {
	Type        command.Type
	Service     string // that is asked; "" means topology.ServiceSession
	ID          string // of the command, which the body says already; "" mints one
	Principal   auth.Principal
	Tenant      string        // whose thing it is; "" means the principal's
	SessionID   string        // "" mints one, for a command that makes a session
	ExecutionID string        // "" mints one, for a command that makes an execution
	About       string        // catalogue id of the subject; "" means the session
	Kind        events.Aspect // of the catalogue, whose answer may name another entry than About; "" for none
	Body        any           // nil for none
	// Secrets are the values that Body leaves out, for a repeat to be told from another request; nil for none.
	Secrets [][]byte
	// Seal gives the body as it is sent, with Secrets sealed, once Prepare is done and the execution's id is known; nil where it is Body.
	Seal func(ctx context.Context, tenant, execution string) (any, error)
	// Prepare puts in place what the command refers to, once the session's id is known; nil for nothing.
	Prepare func(ctx context.Context, tenant, session string) error
	Key     string // Idempotency-Key; "" for none
	// Reserved says that what the command adds is reserved of the tenant's quota already.
	Reserved bool
	// Patience is how long the answer to one try may take, where the work is long; 0 means the time of any command, with more tries.
	Patience time.Duration
}

// Send sends a command and waits for its answer.
func (s *Sender) Send(ctx context.Context, r Request) (command.Answer, error) {
	answer, err := s.send(ctx, r)
	outcome := "ok"
	var p *problem.Error
	if errors.As(err, &p) {
		outcome = string(p.Code)
	}
	s.cfg.Sent(r.Type, outcome)
	return answer, err
}

func (s *Sender) send(ctx context.Context, r Request) (command.Answer, error) {
	if r.Tenant == "" {
		r.Tenant = r.Principal.Tenant
	}
	body, err := encode(r.Body)
	if err != nil {
		return command.Answer{}, problem.From(err)
	}
	if r.Service == "" {
		r.Service = topology.ServiceSession
	}
	kept, name, err := s.identified(ctx, r, body)
	if err != nil {
		return command.Answer{}, err
	}
	if kept.Answer != nil {
		return *kept.Answer, nil
	}
	if err := s.checkRoom(ctx, r); err != nil {
		s.forget(ctx, name)
		return command.Answer{}, err
	}
	cmd := command.Command{
		Type: r.Type, ID: kept.Command, Tenant: r.Tenant, SessionID: r.SessionID, ExecutionID: r.ExecutionID, Actor: r.Principal.Actor(), Body: body, Agents: r.Principal.Agents,
	}
	if err := mint(&cmd); err != nil {
		return command.Answer{}, problem.From(err)
	}
	if err := prepare(ctx, r, &cmd); err != nil {
		s.forget(ctx, name)
		return command.Answer{}, err
	}
	about := r.About
	if about == "" {
		about = cmd.SessionID
	}
	timeout, try := s.cfg.Timeout, s.cfg.Try
	if r.Patience > 0 {
		timeout, try = r.Patience, r.Patience
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer, err := s.ask(ctx, topology.CommandSubject(r.Service, r.Tenant, about), cmd, try)
	if err != nil {
		return command.Answer{}, s.refused(r, cmd, body, err)
	}
	if name != "" {
		s.settle(ctx, name, kept, answer)
	}
	if answer.Error != nil {
		return command.Answer{}, fromAnswer(answer.Error)
	}
	if r.Kind != "" && answer.Ref != nil {
		about = answer.Ref.Subject(r.Kind, r.Tenant).ID
	}
	s.cfg.Stored(about, answer.Position)
	return answer, nil
}

// checkRoom refuses a command that needs room while only the reserve of the store is left, or while the tenant stores as much as it
// may, before anything of it is stored.
func (s *Sender) checkRoom(ctx context.Context, r Request) error {
	if !r.Type.NeedsRoom() {
		return nil
	}
	if err := s.cfg.Room.Check(ctx, 0); err != nil {
		return problem.StorageIsFull().Because(err)
	}
	if s.cfg.Quota == nil || r.Reserved {
		return nil
	}
	return s.cfg.Quota(ctx, r.Tenant)
}

// prepare puts in place what the command refers to.
func prepare(ctx context.Context, r Request, cmd *command.Command) error {
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
	if cmd.Body, err = encode(body); err != nil {
		return problem.From(err)
	}
	return nil
}

// settle keeps an answer for repeats of its request; of a refused one it
// forgets the key, since nothing was done and a corrected request may use it.
func (s *Sender) settle(ctx context.Context, name string, kept record, answer command.Answer) {
	var err error
	if answer.Error != nil {
		err = s.keys.release(ctx, name)
	} else {
		kept.Answer = &answer
		err = s.keys.settle(ctx, name, kept)
	}
	if err != nil {
		s.cfg.Logger.Warn("the answer to a request with an Idempotency-Key was not kept; a repeat asks the session again", "error", err)
	}
}

// forget gives a key back whose command was not sent: a corrected request may use it.
func (s *Sender) forget(ctx context.Context, name string) {
	if name == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), keepFor)
	defer cancel()
	if err := s.keys.release(ctx, name); err != nil {
		s.cfg.Logger.Warn("the Idempotency-Key of a request that was not sent is still taken", "error", err)
	}
}

// identified is identify within the time of a command.
func (s *Sender) identified(ctx context.Context, r Request, body []byte) (record, string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return s.identify(ctx, r, body)
}

// identify gives what the command is known by, and the name under which that is kept if the request has a key.
func (s *Sender) identify(ctx context.Context, r Request, body []byte) (kept record, name string, err error) {
	id := r.ID
	if id == "" {
		if id, err = events.NewID(events.KindCommand, s.cfg.Now(), s.cfg.Entropy); err != nil {
			return record{}, "", problem.From(err)
		}
	}
	if r.Key == "" {
		return record{Command: id}, "", nil
	}
	if err := CheckKey(r.Key); err != nil {
		return record{}, "", err
	}
	if s.namesCommand(r.Key) {
		id = r.Key
	}
	name = keyName(r, r.Key)
	request, err := requestDigest(r, name, body)
	if err != nil {
		return record{}, "", problem.From(err)
	}
	kept, err = s.keys.claim(ctx, name, record{Request: request, Command: id})
	return kept, name, err
}

// namesCommand reports whether a key is one that a 503 named: the id of the command whose outcome is unknown. An id from
// the distant future is no such key, but a text like any other: as a command's id it would make sessions read their
// log before each further command (see session.State.Forgotten).
func (s *Sender) namesCommand(key string) bool {
	if events.CheckID("Idempotency-Key", events.KindCommand, key) != nil {
		return false
	}
	at, ok := reads.MintedAt(key)
	return ok && at.Before(s.cfg.Now().Add(topology.IdempotencyTTL))
}

// stretch is how many rounds a guess at a secret costs whoever reads the bucket of idempotency: some 30 ms.
const stretch = 100_000

// requestDigest is what must be the same for a request to be the same. name is where it is kept.
func requestDigest(r Request, name string, body []byte) (string, error) {
	parts := [][]byte{[]byte(r.Type), []byte(r.SessionID), []byte(r.ExecutionID), body}
	if r.Principal.User != "" {
		parts = append(parts, []byte(r.Principal.User))
	}
	if len(r.Secrets) > 0 {
		slow, err := pbkdf2.Key(sha256.New, digest(r.Secrets...), []byte(name), stretch, sha256.Size)
		if err != nil {
			return "", err
		}
		parts = append(parts, slow)
	}
	return digest(parts...), nil
}

// mint fills in the ids of what the command makes.
func mint(c *command.Command) (err error) {
	switch c.Type {
	case command.TypeCreateSession, command.TypeForkSession, command.TypeStartExecution:
		if c.SessionID != "" { // what it begins with lies in its folder already
			break
		}
		if c.SessionID, err = follow(events.KindSession, c.Tenant, c.ID); err != nil {
			return err
		}
	}
	switch c.Type {
	case command.TypePostMessage, command.TypeStartExecution:
		c.ExecutionID, err = follow(events.KindExecution, c.Tenant, c.ID)
	}
	return err
}

// ask tries until there is an answer or the time is over. Each try has the same
// id, so that a copy of the service that died with the first costs one try and not the request.
func (s *Sender) ask(ctx context.Context, subject string, cmd command.Command, each time.Duration) (command.Answer, error) {
	payload, err := encode(cmd)
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

// refused says what a failed command means for the client.
func (s *Sender) refused(r Request, cmd command.Command, body []byte, err error) error {
	switch {
	case errors.Is(err, bus.ErrOutcomeUnknown):
		return s.unknown(r, cmd, body).Because(err)
	case errors.Is(err, bus.ErrTooLarge):
		return problem.New(problem.PayloadTooLarge, "", "the request is larger than NATS takes; send less at once").Because(err)
	case errors.Is(err, bus.ErrFull):
		return problem.New(problem.Unavailable, "", "too many commands wait already; nothing was done, try again").Because(err)
	case errors.Is(err, bus.ErrNoStream):
		return problem.New(problem.Unavailable, "", "Spool's streams are not installed in NATS yet; nothing was done, try again").Because(err)
	case errors.Is(err, bus.ErrUnavailable):
		return problem.New(problem.Unavailable, "", "NATS does not answer; nothing was done, try again").Because(err)
	}
	return problem.From(err)
}

// keepFor bounds how long a request whose outcome is unknown is held for its key to be kept.
const keepFor = time.Second

// unknown is the answer when nobody can say whether the command takes effect.
func (s *Sender) unknown(r Request, cmd command.Command, body []byte) *problem.Error {
	switch r.Type {
	case command.TypeCreateSession, command.TypeForkSession, command.TypePostMessage, command.TypeStartExecution:
	case command.TypeCreateKey:
		return problem.New(problem.Unavailable, "", "no answer came, so the outcome is unknown: the key may have been made; list the keys and revoke the one that you do not have")
	default:
		return problem.New(problem.Unavailable, "", "no answer came, so the outcome is unknown; to repeat the request is safe")
	}
	key := r.Key
	if key == "" {
		// A retry under the command's own id is the same command, also without a
		// record; the record only lets another body be refused, so it is written as well as can be.
		key = cmd.ID
		ctx, cancel := context.WithTimeout(context.Background(), keepFor)
		defer cancel()
		name := keyName(r, key)
		request, err := requestDigest(r, name, body)
		if err == nil {
			_, err = s.keys.claim(ctx, name, record{Request: request, Command: cmd.ID})
		}
		if err != nil {
			s.cfg.Logger.Info("the key of a command whose outcome is unknown was not kept", "command", cmd.ID, "error", err)
		}
	}
	e := problem.New(problem.Unavailable, "", "no answer came, so the outcome is unknown; repeat the request with header Idempotency-Key: "+key+" and it takes effect once")
	e.IdempotencyKey = key
	return e
}

// fromAnswer gives a service's refusal a line of the table.
func fromAnswer(e *command.Error) error {
	if _, known := problem.Lookup(problem.Code(e.Code)); !known {
		return problem.New(problem.Internal, "", "a service refused with a code that this gateway does not know").Because(e)
	}
	out := problem.New(problem.Code(e.Code), e.Field, e.Detail)
	out.Tip = e.Tip
	return out
}

// encode is JSON without HTML escapes, so that what an application gave stays as it is.
func encode(v any) (json.RawMessage, error) {
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
