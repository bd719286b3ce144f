package command

import (
	"context"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
)

type stateCommand struct {
	of
	At *uint32 `placeholder:"N" help:"Seq of the event; by default the last one."`
}

// Run shows the state of a session after an event.
func (c *stateCommand) Run(a *app) error {
	return c.with(a, "", "", func(ctx context.Context, cl *client.Client) error {
		doc, err := cl.State(ctx, c.Session, c.At)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.json(doc)
		}
		return showState(a, doc.Value)
	})
}

func showState(a *app, s client.State) error {
	rows := [][]any{
		{"session", s.Session.ID}, {"at", fmt.Sprintf("event %d, %s", s.Seq, when(s.Time))}, {"status", sessionState(s.Session)}, {"title", beginning(s.Session.Title)},
		{"agent", s.Session.Agent + " " + s.Session.AgentVersion}, {"architecture", s.Session.Architecture}, {"running in", sandboxState(s.Session)},
		{"reported", usageTotal(s.Reported)}, {"metered", usageTotal(s.Metered)},
		{"sandbox time", sandboxTime(s.Session.SandboxMs, s.Session.SandboxUSD)},
	}
	if r := s.Resolved; r != nil {
		rows = append(rows, []any{"resolved agent", strings.TrimSpace(r.Agent + " " + r.Instance)}, []any{"environments", strings.Join(r.Environments, ", ")},
			[]any{"skills", strings.Join(r.Skills, ", ")}, []any{"MCP servers", strings.Join(r.MCPServers, ", ")})
	}
	for _, list := range s.Todos {
		for _, item := range list.Items {
			rows = append(rows, []any{"todo of " + list.ConversationID, item.Status + ": " + item.Content})
		}
	}
	for _, conversation := range s.Conversations {
		rows = append(rows, []any{"conversation", strings.TrimSpace(conversation.ID + " " + conversation.Name + ", " + conversation.Status)})
	}
	for _, x := range s.Executions {
		rows = append(rows, []any{"execution", x.ID + ", " + x.Phase})
	}
	if err := fields(a, append(rows, []any{"files", s.Files.Summary})...); err != nil {
		return err
	}
	for _, f := range s.Files.Changes {
		if _, err := fmt.Fprintf(a.Out, "  %6d  %-13s  %s  %s\n", f.Seq, terminal.Line(f.Type), terminal.Line(f.Path), size(int64(f.Size))); err != nil {
			return err
		}
	}
	if n := int(s.Files.ChangeCount) - len(s.Files.Changes); n > 0 {
		fmt.Fprintf(a.Out, "  and %d more\n", n)
	}
	fmt.Fprintf(a.Out, "\n%d blocks\n", s.BlockCount)
	for _, b := range s.Blocks {
		if err := blockLine(a, "", b); err != nil {
			return err
		}
		for _, text := range s.Incomplete {
			if text.BlockID == b.ID {
				fmt.Fprintf(a.Out, "          only the first %d bytes of its text at that time are still stored\n", text.Shown)
			}
		}
	}
	return nil
}

// blockLine prints a summary of a block after a mark.
func blockLine(a *app, mark string, b events.Block) error {
	_, err := fmt.Fprintf(a.Out, "%s%-8s  %s\n", mark, terminal.Line(string(b.Status)), terminal.Fit(terminal.Line(blockSummary(b)), summaryColumns))
	return err
}

func usageTotal(t client.Total) string {
	text := fmt.Sprintf("%.0f tokens in, %.0f out, $%.4f", t.InputTokens+t.CacheReadTokens+t.CacheWriteTokens, t.OutputTokens, t.CostUSD)
	if t.Requests > 0 {
		text += fmt.Sprintf(", %.0f requests, %.0f failed", t.Requests, t.Failed)
	}
	return text
}
