package janitor

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// bucket erases objects of a NATS object bucket: the chunks first, then the name,
// so that an object whose removal was interrupted is found again by its name.
type bucket struct {
	eraser
	bucket    string
	bySession map[sessionKey][]object // nil until the objects are listed
}

// object is an object of a NATS object bucket, with the data of the message that describes it under its name.
type object struct {
	Name string    `json:"name"`
	NUID string    `json:"nuid"`
	Size uint64    `json:"size"`
	At   time.Time `json:"-"` // when it was stored
	seq  uint64    // of the name message
}

// id returns the last part of the object's name.
func (o object) id() string { return o.Name[strings.LastIndexByte(o.Name, '/')+1:] }

// openBucket returns the bucket with a name.
func openBucket(ctx context.Context, js jetstream.JetStream, name string) (*bucket, error) {
	e, err := openEraser(ctx, js, "OBJ_"+name)
	return &bucket{eraser: e, bucket: name}, err
}

// nameSubject returns the subject of the message that holds an object's name and describes the object.
func (b *bucket) nameSubject(name string) string {
	return "$O." + b.bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name))
}

// chunkSubject returns the subject of the chunks of an object's content.
func (b *bucket) chunkSubject(nuid string) string { return "$O." + b.bucket + ".C." + nuid }

// list returns the objects for which keep reports true.
func (b *bucket) list(ctx context.Context, keep func(object) bool) ([]object, error) {
	var out []object
	err := b.eachMessage(ctx, newestConsumer("$O."+b.bucket+".M.>"), func(m message) {
		var o object
		if json.Unmarshal(m.data, &o) != nil || o.Name == "" || o.NUID == "" {
			return // not a name message of an object
		}
		if o.At, o.seq = m.at, m.seq; keep(o) {
			out = append(out, o)
		}
	})
	return out, err
}

// sessions lists the objects by the session in their names. The names of a bucket are read once in a pass: a retired
// session gets no new objects.
func (b *bucket) sessions(ctx context.Context) (map[sessionKey][]object, error) {
	if b.bySession != nil {
		return b.bySession, nil
	}
	list := map[sessionKey][]object{}
	_, err := b.list(ctx, func(o object) bool {
		if of, ok := sessionOf(o.Name); ok {
			list[of] = append(list[of], o)
		}
		return false
	})
	if err != nil {
		return nil, err
	}
	b.bySession = list
	return list, nil
}

// objectsOf returns the objects of a session.
func (b *bucket) objectsOf(ctx context.Context, k sessionKey) ([]object, error) {
	list, err := b.sessions(ctx)
	return list[k], err
}

// sessionOf returns the session that an object is named after: <tenant>/<session>/….
func sessionOf(name string) (sessionKey, bool) {
	parts := strings.SplitN(name, "/", 3)
	if len(parts) < 3 {
		return sessionKey{}, false
	}
	return sessionKey{parts[0], parts[1]}, true
}

// remove erases an object as it was listed. If the object was stored again under the same name meanwhile, the new
// object stays, because its chunks and its name message are others.
func (b *bucket) remove(ctx context.Context, o object) error {
	if _, err := b.eraseSubject(ctx, b.chunkSubject(o.NUID), 0); err != nil {
		return err
	}
	return b.erase(ctx, o.seq)
}

// findObject finds an object by its name.
func (b *bucket) findObject(ctx context.Context, name string) (object, bool, error) {
	m, err := b.stream.GetLastMsgForSubject(ctx, b.nameSubject(name))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return object{}, false, nil
	}
	if err != nil {
		return object{}, false, fmt.Errorf("look for %s in bucket %s: %w", name, b.bucket, err)
	}
	var o object
	if err := json.Unmarshal(m.Data, &o); err != nil {
		return object{}, false, fmt.Errorf("read the description of %s in bucket %s: %w", name, b.bucket, err)
	}
	o.At, o.seq = m.Time, m.Sequence
	return o, true, nil
}

// unnamedChunks lists the chunk subjects that no object names and that are older than before: remains of failed uploads and
// of replaced objects.
func (b *bucket) unnamedChunks(ctx context.Context, before time.Time) (nuids []string, err error) {
	// List the chunks first: an object's name is stored after its chunks, so the names of all uploads that have ended
	// are in the list that follows.
	info, err := b.stream.Info(ctx, jetstream.WithSubjectFilter("$O."+b.bucket+".C.>"))
	if err != nil {
		return nil, fmt.Errorf("list chunks of bucket %s: %w", b.bucket, err)
	}
	named := map[string]bool{}
	if _, err := b.list(ctx, func(o object) bool { named[o.NUID] = true; return false }); err != nil {
		return nil, err
	}
	for subject := range info.State.Subjects {
		nuid := strings.TrimPrefix(subject, "$O."+b.bucket+".C.")
		if named[nuid] {
			continue
		}
		m, err := b.stream.GetLastMsgForSubject(ctx, subject)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read %s of bucket %s: %w", subject, b.bucket, err)
		}
		if m.Time.Before(before) {
			nuids = append(nuids, nuid)
		}
	}
	return nuids, nil
}
