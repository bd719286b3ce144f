// Package dead reads dead letters: messages between services that a consumer stopped retrying.
package dead

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// maxScannedLetters is the largest number of dead letters that are read for one page of a list, including letters of other
// tenants.
const maxScannedLetters = 1000

// Letters reads the dead letters in the stream DEAD. It is safe for concurrent use; its errors are *problem.Error.
type Letters struct{ stream *bus.StreamHandle }

// New returns Letters. It does not connect to the stream.
func New(js jetstream.JetStream) *Letters {
	return &Letters{stream: bus.NewStreamHandle(js, topology.StreamDead)}
}

// errNATSUnavailable returns the problem for a failure to read dead letters from NATS.
func errNATSUnavailable(err error) error {
	return problem.New(problem.Unavailable, "", "NATS does not answer, so dead letters cannot be read; try again").WithCause(err)
}

// Viewer is a caller who reads dead letters. It sees the letters of Tenant and, if All is set, those that name no
// tenant.
type Viewer struct {
	Tenant string
	All    bool
}

// canSee reports whether a letter is visible to the reader.
func (r Viewer) canSee(d topology.DeadLetter) bool {
	return d.Tenant == r.Tenant || d.Tenant == "" && r.All
}

// List returns up to n dead letters after a stream sequence, oldest first, and the sequence after which the next page
// begins, or 0 at the end.
func (l *Letters) List(ctx context.Context, r Viewer, after uint64, n int) (list []topology.DeadLetter, next uint64, err error) {
	stream, err := l.stream.Open(ctx)
	if err != nil {
		return nil, 0, errNATSUnavailable(err)
	}
	for range maxScannedLetters {
		msg, err := stream.GetMsg(ctx, after+1, jetstream.WithGetMsgSubject(topology.DeadFilter))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return list, 0, nil
		}
		if err != nil {
			return nil, 0, errNATSUnavailable(err)
		}
		after = msg.Sequence
		d := topology.ParseDeadLetter(msg.Sequence, msg.Time, msg.Subject, msg.Header, msg.Data)
		if !r.canSee(d) {
			continue
		}
		if list = append(list, d); len(list) == n {
			break
		}
	}
	return list, after, nil
}

// Get returns the dead letter with a stream sequence. It returns DEAD_LETTER_NOT_FOUND if there is none that the
// viewer may see.
func (l *Letters) Get(ctx context.Context, r Viewer, sequence uint64) (topology.DeadLetter, error) {
	stream, err := l.stream.Open(ctx)
	if err != nil {
		return topology.DeadLetter{}, errNATSUnavailable(err)
	}
	msg, err := stream.GetMsg(ctx, sequence)
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return topology.DeadLetter{}, errNATSUnavailable(err)
	}
	if err == nil && strings.HasPrefix(msg.Subject, topology.DeadSubject("")) {
		d := topology.ParseDeadLetter(msg.Sequence, msg.Time, msg.Subject, msg.Header, msg.Data)
		if r.canSee(d) {
			return d, nil
		}
	}
	return topology.DeadLetter{}, problem.New(problem.DeadLetterNotFound, "id", fmt.Sprintf("there is no dead letter %d", sequence))
}
