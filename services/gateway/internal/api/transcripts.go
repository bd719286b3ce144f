package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/transcript"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/objects"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

const fieldTranscript = "transcript"

// transcriptTTL is the time for which an uploaded transcript can be used. It is shorter than the shortest time after which the
// janitor removes unreferenced content.
const transcriptTTL = 10 * time.Minute

// TranscriptAccepted is the response to the upload of a valid transcript. Transcript identifies the upload: it is the id of a session that
// does not exist yet. The client has transcriptTTL to create that session, which then continues the transcript.
type TranscriptAccepted struct {
	Transcript string `json:"transcript"`
	transcript.Info
	Size   uint64    `json:"size"` // bytes
	SHA256 string    `json:"sha256"`
	At     time.Time `json:"at"`
}

// transcriptInfoObject returns the name of the object that describes a stored transcript; object is the name of the
// transcript.
func transcriptInfoObject(object string) string { return object + "-found" }

// PutTranscript stores a transcript and checks it while it is received. It stops reading when the transcript is
// refused. A negative length means unknown.
func (s *Server) PutTranscript(ctx context.Context, body io.Reader, length, limit int64) (TranscriptAccepted, error) {
	var out TranscriptAccepted
	p, err := auth.From(ctx)
	if err != nil {
		return out, err
	}
	if length > limit {
		return out, transcriptTooLarge(fmt.Sprintf("the transcript has %d bytes", length), limit)
	}
	if err := s.Objects.CheckRoom(ctx, length); err != nil {
		return out, err
	}
	if out.Transcript, err = events.NewID(events.KindSession, s.Now(), s.Entropy); err != nil {
		return out, problem.From(err)
	}
	hold, err := s.Quota.Reserve(ctx, p.Tenant, max(length, 0))
	if err != nil {
		return out, err
	}
	object := command.TranscriptObject(p.Tenant, out.Transcript)
	defer func() { hold.SettleUnreferenced(s.transcriptReleasedFunc(p.Tenant, out.Transcript, object)) }()
	stored, info, err := s.storeTranscript(ctx, object, body, limit, hold.ReserveBytes)
	var refused *transcript.Error
	switch {
	case errors.As(err, &refused):
		return out, problem.New(problem.TranscriptInvalid, fieldTranscript, refused.Error())
	case errors.Is(err, objects.ErrTooLarge):
		return out, transcriptTooLarge("the transcript is too large", limit)
	case err != nil:
		return out, err
	}
	out.Info, out.Size, out.SHA256, out.At = info, stored.Size, stored.SHA256, s.Now().UTC()
	raw, err := json.Marshal(out)
	if err != nil {
		return out, problem.From(err)
	}
	return out, s.Objects.PutBytes(ctx, transcriptInfoObject(object), raw)
}

// transcriptReleasedFunc returns a function that reports whether the upload of a transcript no longer counts against
// the tenant's storage limit: either a session has begun with the transcript and counts it, or the upload was
// removed.
func (s *Server) transcriptReleasedFunc(tenant, session, object string) func(context.Context) (bool, error) {
	gone := s.Objects.RemovedFunc(object)
	return func(ctx context.Context) (bool, error) {
		status, err := s.Reads.SessionStatus(ctx, tenant, session)
		var p *problem.Error
		if errors.As(err, &p) && p.Code == problem.SessionNotFound || err == nil && status == "" {
			return gone(ctx)
		}
		return err == nil, err
	}
}

// storeTranscript stores a transcript and checks it at the same time.
func (s *Server) storeTranscript(ctx context.Context, object string, body io.Reader, limit int64, take func(context.Context, int64) error) (objects.StoredObject, transcript.Info, error) {
	out, in := io.Pipe()
	var info transcript.Info
	checked := make(chan error, 1)
	go func() {
		var err error
		info, err = transcript.Check(out)
		out.CloseWithError(err) // aborts the upload if the transcript is refused
		checked <- err
	}()
	stored, err := s.Objects.PutStream(ctx, object, io.TeeReader(body, in), limit, take)
	if err != nil {
		in.CloseWithError(err)
	} else {
		in.Close() //nolint:errcheck // it always returns nil
	}
	wrong := <-checked
	var refused *transcript.Error
	if errors.As(wrong, &refused) || err == nil {
		err = wrong
	}
	return stored, info, err
}

// transcriptTooLarge returns the problem for a transcript that exceeds the size limit.
func transcriptTooLarge(what string, limit int64) error {
	return problem.New(problem.PayloadTooLarge, fieldTranscript, fmt.Sprintf("%s; the limit is %d bytes (--max-transcript)", what, limit))
}

// withTranscript returns a request to create a session that begins with the referenced transcript; "" means no
// transcript. The transcript is looked up only if the request is not a repeat, and is stored in into before body is
// called.
func (s *Server) withTranscript(r commands.Request, reference string, into **events.Transcript, body func() any) commands.Request {
	if reference == "" {
		return r
	}
	r.SessionID = reference
	prepare := r.Prepare
	r.Prepare = func(ctx context.Context, tenant, session string) (err error) {
		if *into, err = s.findTranscript(ctx, tenant, reference); err != nil || prepare == nil {
			return err
		}
		return prepare(ctx, tenant, session)
	}
	if r.Seal == nil {
		r.Seal = func(context.Context, string, string) (any, error) { return body(), nil }
	}
	return r
}

// findTranscript returns the uploaded transcript to which a request refers, or a problem if there is none.
func (s *Server) findTranscript(ctx context.Context, tenant, reference string) (*events.Transcript, error) {
	missing := problem.New(problem.TranscriptNotFound, fieldTranscript, "there is no such transcript, or it was uploaded more than 10 minutes ago: upload it again (POST /api/transcripts)")
	if events.CheckID(fieldTranscript, events.KindSession, reference) != nil {
		return nil, missing
	}
	object := command.TranscriptObject(tenant, reference)
	r, err := s.Objects.Get(ctx, transcriptInfoObject(object))
	if errors.Is(err, workspace.ErrNotFound) {
		return nil, missing
	}
	if err != nil {
		return nil, snapshotError(err)
	}
	defer r.Close() //nolint:errcheck // it is only read
	var t TranscriptAccepted
	if err := json.NewDecoder(r).Decode(&t); err != nil {
		return nil, problem.New(problem.Unavailable, "", "the object store does not answer; try again").WithCause(err)
	}
	if s.Now().After(t.At.Add(transcriptTTL)) {
		return nil, missing
	}
	return &events.Transcript{
		Architecture: t.Architecture, Object: object, Size: t.Size, SHA256: t.SHA256, AgentSessionID: t.AgentSessionID, Messages: t.Messages,
	}, nil
}
