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

// objectBucket reads and erases the objects of a NATS object bucket. It erases the chunks of an object first and then
// its name, so that an object whose removal was interrupted is found again by its name.
type objectBucket struct {
	eraser
	bucket    string
	bySession map[sessionKey][]bucketObject // nil until the objects are listed
}

// bucketObject is an object of a NATS object bucket, as the message under its name describes it.
type bucketObject struct {
	Name string    `json:"name"`
	NUID string    `json:"nuid"`
	Size uint64    `json:"size"`
	At   time.Time `json:"-"` // when it was stored
	seq  uint64    // of the name message
}

// lastNamePart returns the part of the object's name after the last slash.
func (o bucketObject) lastNamePart() string { return o.Name[strings.LastIndexByte(o.Name, '/')+1:] }

// openBucket opens the object bucket with a name.
func openBucket(ctx context.Context, js jetstream.JetStream, name string) (*objectBucket, error) {
	e, err := openEraser(ctx, js, "OBJ_"+name)
	return &objectBucket{eraser: e, bucket: name}, err
}

// nameSubject returns the subject of the message that holds an object's name and describes the object.
func (b *objectBucket) nameSubject(name string) string {
	return "$O." + b.bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name))
}

// chunkSubject returns the subject of the chunks of an object's content.
func (b *objectBucket) chunkSubject(nuid string) string { return "$O." + b.bucket + ".C." + nuid }

// listObjects returns those objects of the bucket for which keep returns true.
func (b *objectBucket) listObjects(ctx context.Context, keep func(bucketObject) bool) ([]bucketObject, error) {
	var out []bucketObject
	err := b.eachMessage(ctx, lastPerSubjectConsumer("$O."+b.bucket+".M.>"), func(m streamMessage) {
		var o bucketObject
		if json.Unmarshal(m.data, &o) != nil || o.Name == "" || o.NUID == "" {
			return // not a name message of an object
		}
		if o.At, o.seq = m.at, m.seq; keep(o) {
			out = append(out, o)
		}
	})
	return out, err
}

// objectsBySession returns the objects of the bucket by the session in their names. It reads the names once in a pass,
// because a retired session gets no new objects.
func (b *objectBucket) objectsBySession(ctx context.Context) (map[sessionKey][]bucketObject, error) {
	if b.bySession != nil {
		return b.bySession, nil
	}
	list := map[sessionKey][]bucketObject{}
	_, err := b.listObjects(ctx, func(o bucketObject) bool {
		if of, ok := sessionOfObject(o.Name); ok {
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

// objectsOf returns the objects of the bucket that have the session k in their names.
func (b *objectBucket) objectsOf(ctx context.Context, k sessionKey) ([]bucketObject, error) {
	list, err := b.objectsBySession(ctx)
	return list[k], err
}

// sessionOfObject returns the session in the name of an object, <tenant>/<session>/…. The bool is false if the name has
// another form.
func sessionOfObject(name string) (sessionKey, bool) {
	parts := strings.SplitN(name, "/", 3)
	if len(parts) < 3 {
		return sessionKey{}, false
	}
	return sessionKey{parts[0], parts[1]}, true
}

// removeObject erases an object that was listed before. If an object was stored again under the same name meanwhile, the new
// object stays, because its chunks and its name message are others.
func (b *objectBucket) removeObject(ctx context.Context, o bucketObject) error {
	if _, err := b.eraseSubject(ctx, b.chunkSubject(o.NUID), 0); err != nil {
		return err
	}
	return b.eraseMessage(ctx, o.seq)
}

// findObject returns the object with a name. The bool is false if there is none.
func (b *objectBucket) findObject(ctx context.Context, name string) (bucketObject, bool, error) {
	m, err := b.stream.GetLastMsgForSubject(ctx, b.nameSubject(name))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return bucketObject{}, false, nil
	}
	if err != nil {
		return bucketObject{}, false, fmt.Errorf("look for %s in bucket %s: %w", name, b.bucket, err)
	}
	var o bucketObject
	if err := json.Unmarshal(m.Data, &o); err != nil {
		return bucketObject{}, false, fmt.Errorf("read the description of %s in bucket %s: %w", name, b.bucket, err)
	}
	o.At, o.seq = m.Time, m.Sequence
	return o, true, nil
}

// unnamedChunks returns the ids (NUIDs) of chunks that belong to no object with a name and are older than before:
// remains of failed uploads and of replaced objects.
func (b *objectBucket) unnamedChunks(ctx context.Context, before time.Time) (nuids []string, err error) {
	// List the chunks first: an object's name is stored after its chunks, so the names of all uploads that have ended
	// are in the list that follows.
	info, err := b.stream.Info(ctx, jetstream.WithSubjectFilter("$O."+b.bucket+".C.>"))
	if err != nil {
		return nil, fmt.Errorf("list chunks of bucket %s: %w", b.bucket, err)
	}
	named := map[string]bool{}
	if _, err := b.listObjects(ctx, func(o bucketObject) bool { named[o.NUID] = true; return false }); err != nil {
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
