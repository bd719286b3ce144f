package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spoolhq/spool/pkg/topology"
)

// TestStreamsWith_FindsContentOnTheDisk tests that a text is found in the files of the log, of text in flight and of
// the object stores, and not in those of other streams.
func TestStreamsWith_FindsContentOnTheDisk(t *testing.T) {
	t.Parallel()
	store := t.TempDir()
	write := func(stream, text string) {
		t.Helper()
		dir := filepath.Join(store, "jetstream", topology.AccountLog, "streams", stream, "msgs")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "1.blk"), []byte("\x00\x01"+text+"\x02"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("COMMANDS", "text "+erasureMarker)
	write("DELTAS", "text "+erasureMarker)
	write("EVENTS-1", "text")
	if found, err := streamsContaining(store, erasureMarker); err != nil || len(found) > 0 {
		t.Errorf("streamsWith found %q, %v", found, err)
	}
	want := []string{"EVENTS-0", "OBJ_payloads", "OBJ_workspaces"}
	for _, stream := range want {
		write(stream, "text "+erasureMarker)
	}
	if found, err := streamsContaining(store, erasureMarker); err != nil || !slices.Equal(found, want) {
		t.Errorf("streamsWith found %q, %v, want %q", found, err, want)
	}
}
