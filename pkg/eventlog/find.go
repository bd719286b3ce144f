package eventlog

import (
	"context"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

// HasCommand reports whether a command was carried out on a subject whose commits have no state.
func HasCommand(ctx context.Context, l Log, head Head, command string) (bool, error) {
	_, done, err := findCommit(ctx, l, head, events.DeriveID(events.KindCommit, command))
	return done, err
}

// findCommit reads a subject up to its head and returns the stream sequence of a commit, if it exists.
func findCommit(ctx context.Context, l Log, head Head, commit string) (seq uint64, found bool, err error) {
	if head.Seq == 0 {
		return 0, false, nil
	}
	if head.Commit.ID == commit {
		return head.Seq, true, nil
	}
	for rec, err := range commitsUpTo(ctx, l, head) {
		if err != nil {
			return 0, false, fmt.Errorf("look for commit %s on %s: %w", commit, head.Subject, err)
		}
		if rec.Commit.ID == commit {
			return rec.Position.Seq, true, nil
		}
	}
	return 0, false, nil
}
