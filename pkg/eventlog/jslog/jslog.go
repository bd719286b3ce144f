// Package jslog implements the event log on JetStream.
package jslog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Config configures a Log. JetStream is required.
type Config struct {
	JetStream jetstream.JetStream
	// Conn is the connection for single reads; nil means the connection of JetStream.
	Conn *nats.Conn
	// Shards is the number of streams as installed (topology.ReadLayout); 0 means 1.
	Shards int
	// Partitions is the number of partitions as installed (topology.ReadLayout).
	Partitions events.Partitioning
	// AckTimeout is the time that the first publish of an append waits for its acknowledgement before the outcome is
	// determined by reading; 0 means 10 s. It doubles with each try, up to five times the value. A broken
	// connection is noticed at once, so the timeout only matters for servers that are slow or disappear silently. A
	// read is repeated after a fifth of it.
	AckTimeout time.Duration
	// Keys sign commits, and verify the commits that are signed according to Signing.
	Keys eventlog.Keys
	// Signing are the settings that Provision recorded (topology.ReadSigning). Append writes commits of its CommitVersion,
	// or of a newer version if the subject has one already.
	Signing topology.SigningSettings
	// Logger receives retries and their reasons; nil discards them.
	Logger *slog.Logger
}

// defaultAckTimeout is well above the p99 of an append under load, so that only lost acknowledgements reach it.
const defaultAckTimeout = 10 * time.Second

// Log is the event log. It is safe for concurrent use. Its goroutines end with the connection.
type Log struct {
	js         jetstream.JetStream
	publisher  *publisher
	nc         *nats.Conn
	prefix     string // prefix of the JetStream API, with a trailing dot
	shards     int
	partitions events.Partitioning
	ackTimeout time.Duration
	logger     *slog.Logger
	payloads   *payloadBucket
	keys       eventlog.Keys
	signing    topology.SigningSettings
	counts     []atomic.Pointer[subjectCounts] // by shard: the last count of Changed, nil for none
	batchers   []*batcher                      // by shard
	batchAll   bool                            // in tests: commits of all aspects share batches
}

var _ eventlog.Log = (*Log)(nil)

// New returns a log on streams that topology.Provision has created. It sends nothing.
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
	if cfg.Partitions != 0 && cfg.Shards > cfg.Partitions.PartitionCount() {
		return nil, fmt.Errorf("jslog: partitions: %d is less than the %d shards", cfg.Partitions.PartitionCount(), cfg.Shards)
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
	opts := cfg.JetStream.Options()
	prefix := jetstream.DefaultAPIPrefix
	if opts.Domain != "" {
		prefix = "$JS." + opts.Domain + ".API."
	}
	if opts.APIPrefix != "" {
		prefix = strings.TrimSuffix(opts.APIPrefix, ".") + "."
	}
	l := &Log{
		js: cfg.JetStream, publisher: &publisher{nc: cfg.JetStream.Conn()}, nc: cfg.Conn, prefix: prefix, shards: cfg.Shards, partitions: cfg.Partitions, ackTimeout: cfg.AckTimeout,
		logger: cfg.Logger.With("component", "jslog"), keys: cfg.Keys, signing: cfg.Signing,
		counts: make([]atomic.Pointer[subjectCounts], cfg.Shards),
	}
	l.payloads = &payloadBucket{log: l}
	for range cfg.Shards {
		l.batchers = append(l.batchers, &batcher{log: l, minBatch: minBatchCommits})
	}
	return l, nil
}

// Shards returns the number of streams.
func (l *Log) Shards() int { return l.shards }

// Partitioning returns how the log distributes ids over partitions.
func (l *Log) Partitioning() events.Partitioning { return l.partitions }

// natsSubject returns the NATS subject of a chain of commits.
func (l *Log) natsSubject(s events.Subject) string { return l.partitions.Subject(s) }

// streamName returns the name of the stream that stores the commits of a subject.
func (l *Log) streamName(s events.Subject) string {
	return topology.EventsStreamName(topology.ShardOf(s.Partition(), l.shards))
}

// message is a message of the log in the form of a response of the server.
type message struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
	Raw     []byte    `json:"hdrs"` // encoded headers
	header  nats.Header
}

// Last returns the head of a subject; see eventlog.Reader.
func (l *Log) Last(ctx context.Context, s events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	if err := s.Check(); err != nil {
		return eventlog.Head{}, fmt.Errorf("read last commit: %w", err)
	}
	var m message
	var err error
	if f == eventlog.LeaderOnly {
		m, err = l.getFromLeader(ctx, l.streamName(s), getRequest{LastFor: l.natsSubject(s)})
	} else {
		m, err = l.getDirect(ctx, "DIRECT.GET."+l.streamName(s)+"."+l.natsSubject(s), nil)
	}
	if errors.Is(err, eventlog.ErrNotFound) {
		return eventlog.Head{Subject: s}, nil
	}
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read last commit of %s: %w", s, err)
	}
	head, err := l.decodeHead(ctx, s, m)
	var foreign *eventlog.ForeignError
	if errors.As(err, &foreign) {
		return l.lastBeforeForeign(ctx, foreign, s)
	}
	return head, err
}

// lastBeforeForeign returns the head of a subject whose last message is not part of the log.
func (l *Log) lastBeforeForeign(ctx context.Context, foreign *eventlog.ForeignError, s events.Subject) (eventlog.Head, error) {
	l.logForeign(ctx, foreign)
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

// decodeHead decodes the last message of a subject to a head. The error wraps *eventlog.ForeignError if it is not part of the log.
func (l *Log) decodeHead(ctx context.Context, s events.Subject, m message) (eventlog.Head, error) {
	c, err := l.decodeCommit(ctx, s, m)
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read commit %d of %s: %w", m.Seq, s, err)
	}
	return eventlog.Head{Subject: s, Seq: m.Seq, Hash: c.Hash, Commit: c}, nil
}

// NextHead returns the first commit after a position whose subject matches a NATS filter, as known to the shard's
// leader. Seq is 0 if there is none. A NATS user that calls only NextHead needs only the permission for STREAM.MSG.GET.
func (l *Log) NextHead(ctx context.Context, after eventlog.Position, filter string) (eventlog.Head, error) {
	m, err := l.getFromLeader(ctx, topology.EventsStreamName(after.Shard), getRequest{Seq: after.Seq + 1, NextFor: filter})
	if errors.Is(err, eventlog.ErrNotFound) {
		return eventlog.Head{}, nil
	}
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read the next commit of %s: %w", filter, err)
	}
	s, err := l.partitions.ParseSubject(m.Subject)
	if err != nil {
		return eventlog.Head{}, fmt.Errorf("read commit %d: %w", m.Seq, err)
	}
	return l.decodeHead(ctx, s, m)
}

// CommitAt returns the commit at a position; see eventlog.Reader.
func (l *Log) CommitAt(ctx context.Context, p eventlog.Position) (eventlog.Record, error) {
	if p.Shard < 0 || p.Shard >= l.shards || p.Seq == 0 {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, eventlog.ErrNotFound)
	}
	stream := topology.EventsStreamName(p.Shard)
	req, err := json.Marshal(getRequest{Seq: p.Seq})
	if err != nil {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, err)
	}
	m, err := l.getDirect(ctx, "DIRECT.GET."+stream, req)
	if errors.Is(err, eventlog.ErrNotFound) {
		// The replica that answered may not have the position yet.
		m, err = l.getFromLeader(ctx, stream, getRequest{Seq: p.Seq})
	}
	if err != nil {
		return eventlog.Record{}, fmt.Errorf("read %s: %w", p, err)
	}
	return l.openRecord(ctx, p, m)
}

// getRequest requests one message: by sequence, the last one of a subject, or the first one of a subject from a
// sequence on.
type getRequest struct {
	Seq     uint64 `json:"seq,omitempty"`
	LastFor string `json:"last_by_subj,omitempty"`
	NextFor string `json:"next_by_subj,omitempty"`
}

// getFromLeader requests a message from the stream's leader, which has every acknowledged commit. While there is no
// leader, getFromLeader repeats the request until ctx is done.
func (l *Log) getFromLeader(ctx context.Context, stream string, r getRequest) (message, error) {
	req, err := json.Marshal(r)
	if err != nil {
		return message{}, err
	}
	for b := l.readBackoff(); ; {
		m, err := l.getFromLeaderOnce(ctx, stream, req)
		if err == nil || !isTransient(err) {
			return m, err
		}
		if err := b.wait(ctx, err); err != nil {
			return message{}, err
		}
	}
}

// getFromLeaderOnce sends one request to the stream's leader. It returns eventlog.ErrNotFound if there is no such message, and a transient
// error (see isTransient) if the leader cannot answer now.
func (l *Log) getFromLeaderOnce(ctx context.Context, stream string, req []byte) (message, error) {
	reply, err := l.requestUntilAnswered(ctx, "STREAM.MSG.GET."+stream, req)
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
	case resp.Error != nil && isTransient(resp.Error):
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

// getDirect requests a message from any replica. It returns eventlog.ErrNotFound if the replica has no such message.
func (l *Log) getDirect(ctx context.Context, api string, req []byte) (message, error) {
	reply, err := l.requestUntilAnswered(ctx, api, req)
	if err != nil {
		return message{}, err
	}
	if status := reply.Header.Get("Status"); status != "" {
		if status == "404" {
			return message{}, eventlog.ErrNotFound
		}
		return message{}, fmt.Errorf("%w: the server responds %s %s", eventlog.ErrUnavailable, status, reply.Header.Get("Description"))
	}
	return parseStoredMessage(reply)
}

// parseStoredMessage returns the message of a response, without the headers that the server added.
func parseStoredMessage(reply *nats.Msg) (m message, err error) {
	m = message{Subject: takeServerHeader(reply, jetstream.SubjectHeader), Data: reply.Data, header: reply.Header}
	if m.Seq, err = strconv.ParseUint(takeServerHeader(reply, jetstream.SequenceHeader), 10, 64); err != nil {
		return message{}, fmt.Errorf("the server's answer has no sequence: %w", err)
	}
	takeServerHeader(reply, jetstream.StreamHeader)
	if m.Time, err = time.Parse(time.RFC3339Nano, takeServerHeader(reply, jetstream.TimeStampHeaer)); err != nil {
		return message{}, fmt.Errorf("the server's answer has no time: %w", err)
	}
	return m, nil
}

// takeServerHeader removes and returns a header that the server added to a response. The server appends its headers to
// the stored ones, so the last value of each name is the server's.
func takeServerHeader(reply *nats.Msg, name string) string {
	values := reply.Header.Values(name)
	if len(values) == 0 {
		return ""
	}
	if reply.Header[name] = values[:len(values)-1]; len(values) == 1 {
		reply.Header.Del(name)
	}
	return values[len(values)-1]
}

// requestUntilAnswered sends a read request, which is idempotent, and repeats it until the server responds or ctx is
// done.
func (l *Log) requestUntilAnswered(ctx context.Context, api string, req []byte) (*nats.Msg, error) {
	b := l.readBackoff()
	for {
		try, cancel := context.WithTimeout(ctx, b.timeout())
		reply, err := l.nc.RequestWithContext(try, l.prefix+api, req)
		cancel()
		if err == nil {
			return reply, nil
		}
		if !isTransient(err) {
			return nil, fmt.Errorf("%w: %w", eventlog.ErrUnavailable, err)
		}
		if err := b.wait(ctx, err); err != nil {
			return nil, err
		}
		l.logger.Log(ctx, b.logLevel(), "repeat a read", "api", api, "error", err)
	}
}
