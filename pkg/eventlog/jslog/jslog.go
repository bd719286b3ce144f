// Package jslog is the event log on JetStream.
package jslog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Config of a log. JetStream is required.
type Config struct {
	JetStream jetstream.JetStream
	// Conn is the connection for single reads; nil means JetStream's own.
	Conn *nats.Conn
	// Shards is the number of streams as installed (topology.Shards); 0 means 1.
	Shards int
	// AckTimeout is how long the first try of an append may go unanswered before it is
	// settled by reading; 0 means 10 s. It doubles with each try, up to five times
	// itself. A connection that breaks is noticed at once, so this is for servers that
	// are slow or gone without a word. Reads are asked again after a fifth of it.
	AckTimeout time.Duration
	// Keys sign commits, and check those that Signing says are signed.
	Keys eventlog.Keys
	// Signing is what Provision recorded (topology.ReadSigning). Its CommitVersion is the version of the commits that Append writes; on a
	// subject that has a newer one already Append writes the newer.
	Signing topology.Signing
	// Logger gets what was retried and why; nil discards it.
	Logger *slog.Logger
}

// defaultAckTimeout is well over the p99 of an append under load, so that what it catches is lost, not late.
const defaultAckTimeout = 10 * time.Second

// maxPending is the number of appends that may wait for their acknowledgement at once.
const maxPending = 1 << 20

// Log is the event log. It is safe for concurrent use and its goroutines end with the connection.
type Log struct {
	js         jetstream.JetStream
	pub        jetstream.JetStream // for publishes only: the pending ones of other users of js must not delay an append
	nc         *nats.Conn
	prefix     string // of JetStream's API, with a dot at its end
	shards     int
	ackTimeout time.Duration
	logger     *slog.Logger
	payloads   *payloads
	keys       eventlog.Keys
	signing    topology.Signing
}

var _ eventlog.Log = (*Log)(nil)

// New makes a log on streams that topology.Provision has made. It sends nothing.
func New(cfg Config) (*Log, error) {
	if cfg.JetStream == nil {
		return nil, errors.New("jslog: JetStream is nil")
	}
	if cfg.Shards == 0 {
		cfg.Shards = 1
	}
	if cfg.Shards < 0 || cfg.Shards > topology.MaxShards || topology.MaxShards%cfg.Shards != 0 {
		return nil, fmt.Errorf("jslog: shards: %d must be 1, 2, 4 or 8", cfg.Shards)
	}
	if cfg.AckTimeout < 0 {
		return nil, fmt.Errorf("jslog: ack timeout: %s is negative", cfg.AckTimeout)
	}
	cfg.Signing.CommitVersion = max(cfg.Signing.CommitVersion, 1)
	if cfg.Conn == nil {
		cfg.Conn = cfg.JetStream.Conn()
	}
	if cfg.AckTimeout == 0 {
		cfg.AckTimeout = defaultAckTimeout
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	// The subjects that are published to are the streams' own, whatever the API's prefix is.
	pub, err := jetstream.New(cfg.JetStream.Conn(), jetstream.WithPublishAsyncMaxPending(maxPending), jetstream.WithPublishAsyncTimeout(10*cfg.AckTimeout))
	if err != nil {
		return nil, fmt.Errorf("jslog: %w", err)
	}
	opts := cfg.JetStream.Options()
	prefix := jetstream.DefaultAPIPrefix
	if opts.Domain != "" {
		prefix = "$JS." + opts.Domain + ".API."
	}
	if opts.APIPrefix != "" {
		prefix = strings.TrimSuffix(opts.APIPrefix, ".") + "."
	}
	l := &Log{
		js: cfg.JetStream, pub: pub, nc: cfg.Conn, prefix: prefix, shards: cfg.Shards, ackTimeout: cfg.AckTimeout,
		logger: cfg.Logger.With("component", "jslog"), keys: cfg.Keys, signing: cfg.Signing,
	}
	l.payloads = &payloads{log: l}
	return l, nil
}

// Shards is the number of streams.
func (l *Log) Shards() int { return l.shards }

// stream is where a subject lies.
func (l *Log) stream(s events.Subject) string {
	return topology.EventsStream(topology.ShardOf(s.Partition(), l.shards))
}

// message is a stored message as the server answers it.
type message struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
	Raw     []byte    `json:"hdrs"` // headers as they are sent
	header  nats.Header
}

// Last is the head of a subject; see eventlog.Reader.
func (l *Log) Last(ctx context.Context, s events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	if err := s.Check(); err != nil {
		return eventlog.Head{}, fmt.Errorf("read last commit: %w", err)
	}
	var m message
	var err error
	if f == eventlog.Leader {
		m, err = l.fromLeader(ctx, l.stream(s), getRequest{LastFor: s.String()})
	} else {
		m, err = l.direct(ctx, "DIRECT.GET."+l.stream(s)+"."+s.String(), nil)
	}
	if errors.Is(err, eventlog.ErrNotFound) {
		return eventlog.Head{Subject: s}, nil
	}
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read last commit of %s: %w", s, err)
	}
	head, err := l.headOf(ctx, s, m)
	var foreign *eventlog.ForeignError
	if errors.As(err, &foreign) {
		return l.lastBefore(ctx, foreign, s)
	}
	return head, err
}

// lastBefore is the head of a subject whose last message is not part of the log.
func (l *Log) lastBefore(ctx context.Context, foreign *eventlog.ForeignError, s events.Subject) (eventlog.Head, error) {
	l.report(ctx, foreign)
	head := eventlog.Head{Subject: s}
	for rec, err := range l.Read(ctx, eventlog.Position{Shard: foreign.Position.Shard}, eventlog.Filter{Subject: s}) {
		if err != nil {
			return eventlog.Head{}, fmt.Errorf("read last commit of %s: %w", s, err)
		}
		head = eventlog.Head{Subject: s, Seq: rec.Position.Seq, Hash: rec.Commit.Hash, Commit: rec.Commit}
	}
	head.Guard = foreign.Position.Seq
	return head, nil
}

func (l *Log) headOf(ctx context.Context, s events.Subject, m message) (eventlog.Head, error) {
	c, err := l.decode(ctx, s, m)
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read commit %d of %s: %w", m.Seq, s, err)
	}
	return eventlog.Head{Subject: s, Seq: m.Seq, Hash: c.Hash, Commit: c}, nil
}

// Next returns the first commit after a position whose subject matches a filter of NATS, as the shard's leader knows it;
// Seq 0 means that there is none. A user who calls nothing else needs the right to STREAM.MSG.GET alone.
func (l *Log) Next(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error) {
	m, err := l.fromLeader(ctx, topology.EventsStream(after.Shard), getRequest{Seq: after.Seq + 1, NextFor: filter})
	if errors.Is(err, eventlog.ErrNotFound) {
		return eventlog.Head{}, nil
	}
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read the next commit of %s: %w", filter, err)
	}
	s, err := events.ParseSubject(m.Subject)
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read commit %d: %w", m.Seq, err)
	}
	return l.headOf(ctx, s, m)
}

// At reads one commit; see eventlog.Reader.
func (l *Log) At(ctx context.Context, p eventlog.Position) (eventlog.Record, error) {
	if p.Shard < 0 || p.Shard >= l.shards || p.Seq == 0 {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, eventlog.ErrNotFound)
	}
	stream := topology.EventsStream(p.Shard)
	req, err := json.Marshal(getRequest{Seq: p.Seq})
	if err != nil {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, err)
	}
	m, err := l.direct(ctx, "DIRECT.GET."+stream, req)
	if errors.Is(err, eventlog.ErrNotFound) {
		// The replica that answered may lag behind whoever gave the position.
		m, err = l.fromLeader(ctx, stream, getRequest{Seq: p.Seq})
	}
	if err != nil {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, err)
	}
	return l.open(ctx, p, m)
}

// getRequest asks for one message: by sequence, the last of a subject, or the
// first of a subject from a sequence on.
type getRequest struct {
	Seq     uint64 `json:"seq,omitempty"`
	LastFor string `json:"last_by_subj,omitempty"`
	NextFor string `json:"next_by_subj,omitempty"`
}

// fromLeader asks the stream's leader, which knows every commit that was
// acknowledged. While there is no leader it asks again, until ctx ends.
func (l *Log) fromLeader(ctx context.Context, stream string, r getRequest) (message, error) {
	req, err := json.Marshal(r)
	if err != nil {
		return message{}, err
	}
	for b := l.reading(); ; {
		m, err := l.askLeader(ctx, stream, req)
		if err == nil || !transient(err) {
			return m, err
		}
		if err := b.wait(ctx, err); err != nil {
			return message{}, err
		}
	}
}

func (l *Log) askLeader(ctx context.Context, stream string, req []byte) (message, error) {
	reply, err := l.request(ctx, "STREAM.MSG.GET."+stream, req)
	if err != nil {
		return message{}, err
	}
	var resp struct {
		Error   *jetstream.APIError `json:"error"`
		Message *message            `json:"message"`
	}
	if err := json.Unmarshal(reply.Data, &resp); err != nil {
		return message{}, fmt.Errorf("decode answer of the server: %w", err)
	}
	switch {
	case resp.Error != nil && resp.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return message{}, eventlog.ErrNotFound
	case resp.Error != nil && transient(resp.Error):
		return message{}, resp.Error
	case resp.Error != nil:
		return message{}, fmt.Errorf("%w: %w", eventlog.ErrUnavailable, resp.Error)
	case resp.Message == nil:
		return message{}, errors.New("the server's answer has no message")
	}
	m := *resp.Message
	if len(m.Raw) > 0 {
		if m.header, err = nats.DecodeHeadersMsg(m.Raw); err != nil {
			return message{}, fmt.Errorf("decode the headers of message %d: %w", m.Seq, err)
		}
	}
	return m, nil
}

// direct asks any replica; the answer is the message itself, with its place in headers.
func (l *Log) direct(ctx context.Context, api string, req []byte) (message, error) {
	reply, err := l.request(ctx, api, req)
	if err != nil {
		return message{}, err
	}
	if status := reply.Header.Get("Status"); status != "" {
		if status == "404" {
			return message{}, eventlog.ErrNotFound
		}
		return message{}, fmt.Errorf("%w: the server answers %s %s", eventlog.ErrUnavailable, status, reply.Header.Get("Description"))
	}
	// The server adds where the message lies to the headers that are stored: the last of each name is its own.
	own := func(name string) string {
		values := reply.Header.Values(name)
		if len(values) == 0 {
			return ""
		}
		if reply.Header[name] = values[:len(values)-1]; len(values) == 1 {
			reply.Header.Del(name)
		}
		return values[len(values)-1]
	}
	m := message{Subject: own(jetstream.SubjectHeader), Data: reply.Data, header: reply.Header}
	if m.Seq, err = strconv.ParseUint(own(jetstream.SequenceHeader), 10, 64); err != nil {
		return message{}, fmt.Errorf("the server's answer has no sequence: %w", err)
	}
	own(jetstream.StreamHeader)
	if m.Time, err = time.Parse(time.RFC3339Nano, own(jetstream.TimeStampHeaer)); err != nil {
		return message{}, fmt.Errorf("the server's answer has no time: %w", err)
	}
	return m, nil
}

// request repeats a read until it is answered or ctx ends: a read that was lost may be asked again.
func (l *Log) request(ctx context.Context, api string, req []byte) (*nats.Msg, error) {
	b := l.reading()
	for {
		try, cancel := context.WithTimeout(ctx, b.timeout())
		reply, err := l.nc.RequestWithContext(try, l.prefix+api, req)
		cancel()
		if err == nil {
			return reply, nil
		}
		if !transient(err) {
			return nil, fmt.Errorf("%w: %w", eventlog.ErrUnavailable, err)
		}
		if err := b.wait(ctx, err); err != nil {
			return nil, err
		}
		l.logger.Log(ctx, b.level(), "ask again", "api", api, "error", err)
	}
}
