package command

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

type blocksCommand struct {
	sessionFlags
	Conversation string `placeholder:"ID" help:"Only blocks of this conversation: main, or that of a sub-agent."`
	Before       string `placeholder:"TOKEN" help:"The page before an earlier one, which printed this token."`
	Limit        uint32 `placeholder:"N" help:"Number of blocks, 1 to 200; by default 50."`
}

// Run prints a page of the newest blocks of a session.
func (c *blocksCommand) Run(a *app) error {
	return c.withClientAndPath(a, "", "", func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.Events.ListBlocks, &spoolv1.ListBlocksRequest{
			SessionId: c.Session, ConversationId: c.Conversation, Order: "newest", Before: c.Before, Limit: c.Limit,
		})
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		for _, b := range doc.Value.Blocks {
			if err := printBlockSummary(a, "", b); err != nil {
				return err
			}
		}
		if doc.Value.Next != "" {
			terminal.Fprintf(a.Out, "earlier blocks: --before %s\n", doc.Value.Next)
		}
		return nil
	})
}

type timelineCommand struct {
	sessionFlags
	Buckets uint32 `default:"60" placeholder:"N" help:"Number of periods of equal length, 1 to 1000."`
}

// densityMarks are the characters for the number of events of a bucket, from none to as many as the fullest bucket of the lane.
const densityMarks = " .:-=+*#"

// Run prints the timeline of a session.
func (c *timelineCommand) Run(a *app) error {
	return c.withClientAndPath(a, "", "", func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.Events.GetTimeline, &spoolv1.GetTimelineRequest{SessionId: c.Session, Buckets: c.Buckets})
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		return printTimeline(a, doc.Value)
	})
}

// printTimeline prints a timeline: a line for each lane, then a line for each mark.
func printTimeline(a *app, t *spoolv1.Timeline) error {
	bucket := time.Duration(t.BucketMs * float64(time.Millisecond))
	terminal.Fprintf(a.Out, "%s to %s, %s for each character, up to event %d\n", formatTime(t.Start), formatTime(t.End), bucket, t.Tip)
	var rows [][]any
	for _, l := range t.Lanes {
		rows = append(rows, []any{strings.TrimSpace(l.Kind + " " + l.GetConversationId() + " " + l.GetName()), l.Total, "|" + formatDensity(l.Events) + "|"})
	}
	if t.MoreLanes > 0 {
		rows = append(rows, []any{fmt.Sprintf("and %d more conversations", t.MoreLanes)})
	}
	if err := printFields(a, rows...); err != nil {
		return err
	}
	if t.MoreMarks > 0 {
		terminal.Fprintf(a.Out, "%d earlier marks are omitted\n", t.MoreMarks)
	}
	rows = nil
	for _, m := range t.Marks {
		text := strings.TrimSpace(m.GetStatus() + " " + m.GetCode() + " " + m.GetMessage())
		rows = append(rows, []any{m.Seq, formatTime(m.Time), m.Type, m.GetConversationId(), shortenSummary(text)})
	}
	return printFields(a, rows...)
}

// formatDensity returns a character for each bucket.
func formatDensity(counts []uint32) string {
	var most uint32 = 1
	for _, n := range counts {
		most = max(most, n)
	}
	var b strings.Builder
	for _, n := range counts {
		steps := uint64(len(densityMarks) - 1)
		b.WriteByte(densityMarks[(uint64(n)*steps+uint64(most)-1)/uint64(most)]) // rounded up: only an empty bucket is blank
	}
	return b.String()
}
