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

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// erasureMarker is part of every message to the sessions that are deleted while faults are injected, and of nothing
// else. Their erasure is complete when no file contains it.
const erasureMarker = "to-be-erased"

// createAndDelete creates sessions until the channel until is closed. It posts a message to each and then deletes the
// session, whether its query has ended or not.
func (d *clientDriver) createAndDelete(ctx context.Context, until <-chan struct{}, r *rand.Rand) {
	defer d.posts.Done()
	for n := 0; ; n++ {
		id, err := d.createSession(ctx, fmt.Sprintf("deleted-%d", n), events.Budget{})
		if err == nil {
			err = d.postAndDelete(ctx, until, id, fmt.Sprintf("%s %s", messageTexts[r.IntN(len(messageTexts))], erasureMarker), time.Duration(r.IntN(6000))*time.Millisecond)
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

// postAndDelete posts text as a message to a session. It deletes the session after the time after, or when the channel
// until is closed.
func (d *clientDriver) postAndDelete(ctx context.Context, until <-chan struct{}, id, text string, after time.Duration) error {
	status, answer, err := d.sendUntilAnswered(ctx, http.MethodPost, "/api/sessions/"+id+"/messages", id, map[string]any{"content": text}, nil)
	if err != nil || status != http.StatusAccepted {
		return errors.Join(fmt.Errorf("message to %s: %d %s", id, status, answer), err)
	}
	// The message was accepted, so it is on the disk. This shows that the search in awaitErased can find it.
	if found, err := streamsContaining(filepath.Join(d.c.dir, "nats"), erasureMarker); err != nil || len(found) == 0 {
		return errors.Join(fmt.Errorf("the message to %s is in the files of no stream", id), err)
	}
	select {
	case <-until:
	case <-ctx.Done():
	case <-time.After(after):
	}
	return d.deleteSession(ctx, id)
}

// deleteSession deletes a session. It also accepts the status 404, which a repeated request gets.
func (d *clientDriver) deleteSession(ctx context.Context, id string) error {
	status, answer, err := d.sendUntilAnswered(ctx, http.MethodDelete, "/api/sessions/"+id, "delete-"+id, nil, nil)
	if err != nil || status/100 != 2 && status != http.StatusNotFound {
		return errors.Join(fmt.Errorf("delete of %s: %d %s", id, status, answer), err)
	}
	return nil
}

// awaitErased blocks until no file of the NATS streams that hold sessions contains erasureMarker.
func (d *clientDriver) awaitErased(ctx context.Context) error {
	deadline := time.Now().Add(settleTimeout)
	for {
		found, err := streamsContaining(filepath.Join(d.c.dir, "nats"), erasureMarker)
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

// streamsContaining returns the streams in the NATS store, a folder, that hold content of sessions and have a file that
// contains text.
func streamsContaining(store, text string) (found []string, err error) {
	err = filepath.WalkDir(store, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && entry.IsDir() {
			return nil
		}
		if err != nil {
			return err
		}
		_, descendants, ok := strings.Cut(filepath.ToSlash(path), "/streams/")
		stream, _, _ := strings.Cut(descendants, "/")
		if !ok || !holdsSessionContent(stream) || slices.Contains(found, stream) {
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

// holdsSessionContent reports whether a stream holds content of sessions that the janitor erases. It returns false for
// COMMANDS, which holds a message only until it is executed, and for DELTAS, whose messages expire.
func holdsSessionContent(stream string) bool {
	return strings.HasPrefix(stream, strings.TrimSuffix(topology.EventsStreamName(0), "0")) || slices.Contains([]string{"OBJ_" + topology.BucketWorkspaces, "OBJ_" + topology.BucketPayloads}, stream)
}
