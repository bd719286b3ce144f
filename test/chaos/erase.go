package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/topology"
)

// marker is part of every message to a session that is deleted during the faults, and of nothing else.
const marker = "to-be-erased"

// createAndDelete creates sessions, posts a message to each and deletes the session, whether its query has ended or not, until
// the faults end.
func (d *driver) createAndDelete(ctx context.Context, until <-chan struct{}, r *rand.Rand) {
	defer d.posts.Done()
	for n := 0; ; n++ {
		id, err := d.create(ctx, fmt.Sprintf("deleted-%d", n))
		if err == nil {
			err = d.postAndDelete(ctx, until, id, fmt.Sprintf("%s %s", messageTexts[r.IntN(len(messageTexts))], marker), time.Duration(r.IntN(6000))*time.Millisecond)
		}
		if err != nil {
			d.recordViolation("session %d that is deleted at once: %v", n, err)
			return
		}
		d.mu.Lock()
		d.deleted++
		d.mu.Unlock()
		select {
		case <-until:
			return
		case <-ctx.Done():
			return
		default:
		}
	}
}

// postAndDelete posts a message to a session, and deletes the session after a time or when the faults end.
func (d *driver) postAndDelete(ctx context.Context, until <-chan struct{}, id, text string, after time.Duration) error {
	status, answer, err := d.callUntilKnown(ctx, http.MethodPost, "/api/sessions/"+id+"/messages", id, map[string]any{"content": text}, nil)
	if err != nil || status != http.StatusAccepted {
		return errors.Join(fmt.Errorf("message to %s: %d %s", id, status, answer), err)
	}
	// The message was accepted, so it is on the disk. This shows that the search in awaitErased can find it.
	if found, err := streamsWith(filepath.Join(d.c.dir, "nats"), marker); err != nil || len(found) == 0 {
		return errors.Join(fmt.Errorf("the message to %s is in the files of no stream", id), err)
	}
	select {
	case <-until:
	case <-ctx.Done():
	case <-time.After(after):
	}
	return d.delete(ctx, id)
}

// delete deletes a session. The answer to a repeated request is 404.
func (d *driver) delete(ctx context.Context, id string) error {
	status, answer, err := d.callUntilKnown(ctx, http.MethodDelete, "/api/sessions/"+id, "delete-"+id, nil, nil)
	if err != nil || status/100 != 2 && status != http.StatusNotFound {
		return errors.Join(fmt.Errorf("delete of %s: %d %s", id, status, answer), err)
	}
	return nil
}

// awaitErased blocks until no stream that holds content has the marker on the disk.
func (d *driver) awaitErased(ctx context.Context) error {
	deadline := time.Now().Add(settleTimeout)
	for {
		found, err := streamsWith(filepath.Join(d.c.dir, "nats"), marker)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s after their sessions were deleted, messages are still in the files of %v", settleTimeout, found)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryPause):
		}
	}
}

// streamsWith returns the streams that hold content and whose files contain a text.
func streamsWith(store, text string) (found []string, err error) {
	err = filepath.WalkDir(store, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && entry.IsDir() {
			return nil
		}
		if err != nil {
			return err
		}
		_, descendants, ok := strings.Cut(filepath.ToSlash(path), "/streams/")
		stream, _, _ := strings.Cut(descendants, "/")
		if !ok || !holdsContent(stream) || slices.Contains(found, stream) {
			return nil
		}
		raw, err := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, []byte(text)) {
			found = append(found, stream)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the server has replaced the file
		}
		return err
	})
	return found, err
}

// holdsContent reports whether a stream holds the content of sessions that the janitor erases. COMMANDS holds a message
// until it is executed, and its files are overwritten later. DELTAS ends by age.
func holdsContent(stream string) bool {
	return strings.HasPrefix(stream, strings.TrimSuffix(topology.EventsStream(0), "0")) || slices.Contains([]string{"OBJ_" + topology.BucketWorkspaces, "OBJ_" + topology.BucketPayloads}, stream)
}
