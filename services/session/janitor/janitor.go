package janitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
)

// passLockKey is the key of the Postgres advisory lock of the janitor that runs a pass: the bytes of "spooljan".
const passLockKey = 0x73706f6f6c6a616e

// ErrPassRunning is returned if another janitor is running a pass.
var ErrPassRunning = errors.New("another janitor is at work; try again when it has finished")

// ContentKind is the kind of content that a ReportItem describes.
type ContentKind string

// The kinds of items.
const (
	// KindSession is the kind of the content (commits and objects) of a deleted session.
	KindSession ContentKind = "session"
	// KindChunks is the kind of content of an object bucket that has no name: remains of a failed upload or of a
	// replaced object.
	KindChunks ContentKind = "chunks"
	// KindSnapshots is the kind of a session's snapshots that are more than the retention keeps.
	KindSnapshots ContentKind = "snapshots"
	// KindFiles is the kind of files that were uploaded into a session's workspace and that the session's last snapshot
	// contains.
	KindFiles ContentKind = "files"
	// KindUploads is the kind of uploaded files that no session has: their request was refused, their session was never
	// created, or they came after the removal of the session's content.
	KindUploads ContentKind = "uploads"
	// KindSkill is the kind of the ZIP of a skill to which no version refers, and of an upload of a skill.
	KindSkill ContentKind = "skill"
	// KindSecret is the kind of the encrypted value of a secret that came with a refused request.
	KindSecret ContentKind = "secret"
)

// ReportItem describes content that a pass of the janitor removed, would remove, or will remove after a condition that
// Waits describes.
type ReportItem struct {
	Kind     ContentKind `json:"kind"`
	Tenant   string      `json:"tenant,omitempty"`
	Name     string      `json:"name"`
	Messages uint32      `json:"messages,omitempty"` // commits of the log
	Objects  uint32      `json:"objects,omitempty"`
	Bytes    uint64      `json:"bytes,omitempty"` // of objects
	// Waits is the condition for which the item waits; "" for an item that is removed now.
	Waits string `json:"waits,omitempty"`
}

// PassReport lists the items that a pass of the janitor found.
type PassReport struct {
	Items []ReportItem `json:"items"`
}

// Janitor is one copy of the janitor.
type Janitor struct {
	cfg    Config
	deps   Deps
	js     jetstream.JetStream
	counts *metrics
	// fileNeeded holds the files that wait for a snapshot that contains them. The key is the sequence of the file's
	// object, the value the sequence of the session's last manifest at the time of the check. It is used only within a
	// pass.
	fileNeeded map[uint64]uint64
	// trimmed holds removals from workspaces of existing sessions that are not in the log yet. If the process ends,
	// their bytes count until the session's content is removed.
	trimmed map[sessionKey]events.WorkspaceTrimmed
}

// New checks the config and returns a janitor. It does not connect to NATS or Postgres.
func New(cfg Config, deps Deps) (*Janitor, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("janitor: %w", err)
	}
	if deps.NATS == nil || deps.Log == nil || deps.Logger == nil {
		return nil, errors.New("janitor: NATS, Log and Logger are required")
	}
	js, err := jetstream.New(deps.NATS)
	if err != nil {
		return nil, fmt.Errorf("janitor: %w", err)
	}
	if deps.Clock == nil {
		deps.Clock = bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.EventsStreamName(0), Logger: deps.Logger})
	}
	if deps.Now == nil {
		deps.Now = deps.Clock.Now
	}
	return &Janitor{cfg: cfg, deps: deps, js: js, counts: newMetrics(deps.Metrics), fileNeeded: map[uint64]uint64{}, trimmed: map[sessionKey]events.WorkspaceTrimmed{}}, nil
}

// Run starts a pass at every interval until ctx ends. A pass that fails is logged, and the next pass continues the
// work.
func (j *Janitor) Run(ctx context.Context) error {
	tick := time.NewTicker(j.cfg.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		_, err := j.RunPass(ctx, false)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrPassRunning):
			j.deps.Logger.Debug("another janitor is at work")
		case err != nil:
			j.counts.countPass(false)
			j.deps.Logger.Warn("a pass failed; the next one continues the work", "error", err)
		default:
			j.counts.countPass(true)
		}
	}
}

// RunPass removes content that must not be kept any longer. If dry is true, it only reports what it would remove. A
// failure for one session does not prevent the work for others; the returned error contains all failures.
func (j *Janitor) RunPass(ctx context.Context, dry bool) (_ PassReport, err error) {
	// The ages of objects are measured with the clock that set their times.
	if err := j.deps.Clock.Measure(ctx); err != nil {
		return PassReport{}, err
	}
	conn, err := readmodel.Connect(ctx, j.cfg.DatabaseURL, readmodel.Schema)
	if err != nil {
		return PassReport{}, fmt.Errorf("connect to postgres: %w", err)
	}
	// Closing the connection releases the lock, also if this process is killed.
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	var alone bool
	if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", int64(passLockKey)).Scan(&alone); err != nil {
		return PassReport{}, fmt.Errorf("take the janitor's lock: %w", err)
	}
	if !alone {
		return PassReport{}, ErrPassRunning
	}
	// Release the lock explicitly: Postgres ends a connection some time later, and the next pass may begin before
	// that.
	defer func() {
		_, unlock := conn.Exec(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock($1)", int64(passLockKey))
		err = errors.Join(err, unlock)
	}()
	p, err := j.openPass(ctx, conn, dry)
	if err != nil {
		return PassReport{}, err
	}
	if err = p.runSteps(ctx); err == nil {
		j.fileNeeded = p.stillNeeded // without files that were removed meanwhile
	}
	return p.report, err
}

// pass holds the state of one pass of a Janitor over the log and the object buckets.
type pass struct {
	cfg         Config
	log         eventlog.Log
	sessions    eventlog.Sessions
	logger      *slog.Logger
	now         func() time.Time
	js          jetstream.JetStream
	conn        *pgx.Conn
	counts      *metrics
	fileNeeded  map[uint64]uint64                      // of the Janitor, as the previous pass left it
	stillNeeded map[uint64]uint64                      // fileNeeded for the next pass
	trimmed     map[sessionKey]events.WorkspaceTrimmed // of the Janitor
	dry         bool
	report      PassReport
	removed     int // sessions

	streams              []eraser // of the log, by shard
	secrets, idempotency eraser
	workspaces, payloads *objectBucket
	skills               *objectBucket
	store                *natsstore.Store        // store of workspaces; nil until it is opened
	forks                *[]unfoldedFork         // forks that the log has and the read models do not have yet; nil until they are read
	requests             map[sessionKey][]string // keys of idempotency records; nil until they are listed
}

// openPass returns a pass that uses the Postgres connection conn, and opens the streams and buckets that the pass
// needs.
func (j *Janitor) openPass(ctx context.Context, conn *pgx.Conn, dry bool) (*pass, error) {
	p := &pass{
		cfg: j.cfg, log: j.deps.Log, sessions: eventlog.Sessions{Log: j.deps.Log}, logger: j.deps.Logger, now: j.deps.Now,
		js: j.js, conn: conn, counts: j.counts, fileNeeded: j.fileNeeded, stillNeeded: map[uint64]uint64{}, trimmed: j.trimmed, dry: dry, report: PassReport{Items: []ReportItem{}},
	}
	for shard := range j.deps.Log.Shards() {
		e, err := openEraser(ctx, j.js, topology.EventsStreamName(shard))
		if err != nil {
			return nil, err
		}
		p.streams = append(p.streams, e)
	}
	var errs [5]error
	p.secrets, errs[0] = openEraser(ctx, j.js, "KV_"+topology.BucketSecrets)
	p.idempotency, errs[1] = openEraser(ctx, j.js, "KV_"+topology.BucketIdempotency)
	p.workspaces, errs[2] = openBucket(ctx, j.js, topology.BucketWorkspaces)
	p.payloads, errs[3] = openBucket(ctx, j.js, topology.BucketPayloads)
	p.skills, errs[4] = openBucket(ctx, j.js, topology.BucketSkills)
	return p, errors.Join(errs[:]...)
}

// addItem adds an item to the report of the pass.
func (p *pass) addItem(i ReportItem) { p.report.Items = append(p.report.Items, i) }

// runSteps executes all steps of the pass. An error in one step does not prevent the others.
func (p *pass) runSteps(ctx context.Context) error {
	return errors.Join(p.processDeletedSessions(ctx), p.removeWorkspaceObjects(ctx), p.appendTrimEvents(ctx), p.removeSkillObjects(ctx), p.removeRefusedSecrets(ctx), p.eraseUnnamedChunks(ctx))
}

// removalCutoff returns the time before which an object must have been stored to be removed, if the object has a name
// and nothing refers to it.
func (p *pass) removalCutoff() time.Time { return p.now().Add(-max(p.cfg.Uploads, minObjectAge)) }

// removeObjects adds one item about the objects in list to the report, and erases the objects unless the pass is dry.
func (p *pass) removeObjects(ctx context.Context, b *objectBucket, item ReportItem, list []bucketObject) error {
	if len(list) == 0 {
		return nil
	}
	item.Objects = uint32(len(list)) //nolint:gosec // a count
	for _, o := range list {
		item.Bytes += o.Size
	}
	p.addItem(item)
	if p.dry {
		return nil
	}
	for _, o := range list {
		if err := b.removeObject(ctx, o); err != nil {
			return err
		}
		p.recordTrimmedObject(item, o)
	}
	p.counts.countRemoved(item.Kind, 1, item.Bytes)
	return nil
}

// eraseUnnamedChunks erases chunks in the object buckets that belong to no object with a name.
func (p *pass) eraseUnnamedChunks(ctx context.Context) error {
	for _, b := range []*objectBucket{p.workspaces, p.payloads, p.skills} {
		list, err := b.unnamedChunks(ctx, p.now().Add(-p.cfg.Uploads))
		if err != nil {
			return err
		}
		for _, nuid := range list {
			p.addItem(ReportItem{Kind: KindChunks, Name: b.bucket + "/" + nuid, Objects: 1})
			if p.dry {
				continue
			}
			if _, err := b.eraseSubject(ctx, b.chunkSubject(nuid), 0); err != nil {
				return err
			}
			p.counts.countRemoved(KindChunks, 1, 0)
		}
	}
	return nil
}
