package command

import (
	"context"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type stateCommand struct {
	sessionFlags
	At *uint32 `placeholder:"N" help:"Seq of the event; by default the last one."`
}

// Run prints the state that a session had after an event.
func (c *stateCommand) Run(a *app) error {
	return c.withClientAndPath(a, "", "", func(ctx context.Context, cl *client.Client) error {
		doc, err := cl.GetState(ctx, c.Session, c.At)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		return printState(a, doc.Value)
	})
}

// printState prints the state of a session.
func printState(a *app, s *spoolv1.SessionState) error {
	session := s.GetSession()
	rows := [][]any{
		{"session", session.GetSessionId()}, {"at", fmt.Sprintf("event %d, %s", s.Seq, formatTime(s.Time))}, {"status", describeSession(session)}, {"title", titleExcerpt(session.GetTitle())},
		{"agent", session.GetAgent() + " " + session.GetAgentVersion()}, {"architecture", session.GetArchitecture()}, {"running in", describeSandbox(session)},
		{"reported", formatUsageTotal(s.Reported)}, {"metered", formatUsageTotal(s.Metered)},
		{"sandbox time", formatSandboxTime(session.GetSandboxMs(), session.GetSandboxCostUsd())},
	}
	if r := s.Resolved; r != nil {
		rows = append(rows, []any{"resolved agent", strings.TrimSpace(r.GetAgent() + " " + r.GetInstance())}, []any{"environments", strings.Join(r.Environments, ", ")},
			[]any{"skills", strings.Join(r.Skills, ", ")}, []any{"MCP servers", strings.Join(r.McpServers, ", ")})
	}
	for _, list := range s.Todos {
		for _, item := range list.Items {
			rows = append(rows, []any{"todo of " + list.ConversationId, item.Status + ": " + item.Content})
		}
	}
	for _, conversation := range s.Conversations {
		rows = append(rows, []any{"conversation", strings.TrimSpace(conversation.ConversationId + " " + conversation.GetName() + ", " + conversation.Status)})
	}
	for _, x := range s.Executions {
		rows = append(rows, []any{"execution", x.ExecutionId + ", " + x.Phase})
	}
	if err := printFields(a, append(rows, []any{"files", s.Files.GetSummary()})...); err != nil {
		return err
	}
	for _, f := range s.Files.GetChanges() {
		if _, err := terminal.Fprintf(a.Out, "  %6d  %-13s  %s  %s\n", f.Seq, f.Type, f.Path, formatSize(int64(f.Size))); err != nil {
			return err
		}
	}
	if n := int(s.Files.GetChangeCount()) - len(s.Files.GetChanges()); n > 0 {
		terminal.Fprintf(a.Out, "  and %d more\n", n)
	}
	terminal.Fprintf(a.Out, "\n%d blocks\n", s.BlockCount)
	for _, b := range s.Blocks {
		if err := printBlockSummary(a, "", b); err != nil {
			return err
		}
		for _, text := range s.IncompleteText {
			if text.BlockId == b.Id {
				terminal.Fprintf(a.Out, "          only the first %d bytes of its text at that time are still stored\n", text.ShownBytes)
			}
		}
	}
	return nil
}

// printBlockSummary prints a one-line summary of a block after a mark.
func printBlockSummary(a *app, mark string, block *spoolv1.Block) error {
	b, err := client.ConvertStored[events.Block](block)
	if err != nil {
		return err
	}
	_, err = terminal.Fprintf(a.Out, "%s%-8s  %s\n", mark, string(b.Status), shortenSummary(summarizeBlock(b)))
	return err
}

// shortenSummary shortens a text so that it fits into a line of a list.
func shortenSummary(s string) string {
	return terminal.FitLine(terminal.SafeLine(s), maxSummaryColumns)
}

// formatUsageTotal formats the tokens and the cost of a session.
func formatUsageTotal(t *spoolv1.UsageTotal) string {
	text := fmt.Sprintf("%.0f tokens in, %.0f out, $%.4f", t.GetInputTokens()+t.GetCacheReadTokens()+t.GetCacheWriteTokens(), t.GetOutputTokens(), t.GetCostUsd())
	if t.GetRequests() > 0 {
		text += fmt.Sprintf(", %.0f requests, %.0f failed", t.GetRequests(), t.GetFailed())
	}
	return text
}
