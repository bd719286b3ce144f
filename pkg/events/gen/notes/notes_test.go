package notes_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/events/gen/notes"
)

func TestRead_ReturnsTheCommentsOfFields(t *testing.T) {
	t.Parallel()
	got, err := notes.ReadFieldComments("../..")
	if err != nil {
		t.Fatal(err)
	}
	if note := got["AgentSpec.Architecture"]; note != "claude-code, codex, opencode, acp or spool" {
		t.Errorf("note of a field: %q", note)
	}
	if note, ok := got["AgentSpec.Tools"]; note != "" || !ok {
		t.Errorf("note of a field without a comment: %q, %v", note, ok)
	}
	if got, err := notes.ReadFieldComments(t.TempDir()); err != nil || len(got) > 0 {
		t.Errorf("notes of an empty folder: %v, %v", got, err)
	}
}
