package command

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/skill"
)

// Store stores the ZIPs of skills. It is the NATS object bucket skills.
type Store interface {
	Get(ctx context.Context, name string) (io.ReadCloser, error)
	// StoredAt returns when an object was stored, by the server's clock; zero if there is none.
	StoredAt(ctx context.Context, name string) (time.Time, error)
	Put(ctx context.Context, name string, r io.Reader) error
}

// zipStore holds the Store of ZIPs, and ensures that this copy of the service stores each ZIP once, also if several
// pushes with the same ZIP arrive at the same time. If two copies of the service store a ZIP at the same time, the
// bucket has the object of the last one, and the chunks of the other one have no name.
type zipStore struct {
	store Store

	mu   sync.Mutex
	busy map[string]chan struct{} // by digest; closed when the command that stores it is done
}

// lockDigest blocks until no other command of this copy of the service stores the ZIP with the digest, or ctx ends. The
// caller may then store it, and must call release.
func (k *zipStore) lockDigest(ctx context.Context, digest string) (release func(), err error) {
	for {
		k.mu.Lock()
		other, taken := k.busy[digest]
		if !taken {
			own := make(chan struct{})
			if k.busy == nil {
				k.busy = map[string]chan struct{}{}
			}
			k.busy[digest] = own
			k.mu.Unlock()
			return func() {
				k.mu.Lock()
				delete(k.busy, digest)
				k.mu.Unlock()
				close(own)
			}, nil
		}
		k.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// maxZIPAge is the maximum age of a stored ZIP on which a push relies. The janitor removes a ZIP to which no version
// refers when it is older than 15 minutes, and a push takes at most 5 minutes.
const maxZIPAge = 5 * time.Minute

// storeZIP stores a ZIP under its digest, unless the bucket has it and it is younger than maxZIPAge.
func (h *Handler) storeZIP(ctx context.Context, digest string, zip *uploadedZIP) error {
	release, err := h.keeper.lockDigest(ctx, digest)
	if err != nil {
		return err
	}
	defer release()
	at, err := h.keeper.store.StoredAt(ctx, digest)
	if err != nil || h.cfg.Now().Sub(at) < maxZIPAge {
		return err
	}
	if err := h.keeper.store.Put(ctx, digest, io.NewSectionReader(zip.file, 0, zip.size)); err != nil {
		return err
	}
	h.cfg.Kept()
	return nil
}

// copyAtMost copies r to w, and returns the number of copied bytes. The error is a *skill.Error if r has more than most
// bytes.
func copyAtMost(w io.Writer, r io.Reader, most int64) (int64, error) {
	n, err := io.Copy(w, io.LimitReader(r, most+1))
	if err == nil && n > most {
		err = &skill.Error{Code: skill.CodeTooLarge, Field: "zip", Detail: fmt.Sprintf("has more than %d bytes", most)}
	}
	return n, err
}
