package client

import (
	"context"
	"encoding/json"
	"net/url"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// State is a session after one of its events.
type State struct {
	Seq        uint32         `json:"seq"`
	Time       time.Time      `json:"time"`
	Session    Session        `json:"session"`
	Executions []Execution    `json:"executions"` // the last ones
	Count      uint32         `json:"executionCount"`
	Blocks     []events.Block `json:"blocks"`
	BlockCount uint32         `json:"blockCount"`
	Incomplete []struct {
		BlockID string `json:"blockId"`
		Shown   uint32 `json:"shownBytes"`
	} `json:"incompleteText"`
	Todos []struct {
		ConversationID string            `json:"conversationId"`
		Items          []events.TodoItem `json:"items"`
	} `json:"todos"`
	Conversations []struct {
		ID     string `json:"conversationId"`
		Name   string `json:"name"`
		Status string `json:"status"`
	} `json:"conversations"`
	Reported Total `json:"reported"`
	Metered  Total `json:"metered"`
	Resolved *struct {
		ExecutionID  string   `json:"executionId"`
		Agent        string   `json:"agent"`
		Instance     string   `json:"instance"`
		Environments []string `json:"environments"`
		Skills       []string `json:"skills"`
		MCPServers   []string `json:"mcpServers"`
	} `json:"resolved"`
	Files struct {
		Summary string `json:"summary"`
		Changes []struct {
			Seq  uint32  `json:"seq"`
			Type string  `json:"type"`
			Path string  `json:"path"`
			Size float64 `json:"size"`
		} `json:"changes"`
		ChangeCount uint32 `json:"changeCount"`
	} `json:"files"`
}

// Total is a sum of usage.
type Total struct {
	InputTokens      float64 `json:"inputTokens"`
	OutputTokens     float64 `json:"outputTokens"`
	CacheReadTokens  float64 `json:"cacheReadTokens"`
	CacheWriteTokens float64 `json:"cacheWriteTokens"`
	CostUSD          float64 `json:"costUsd"`
	Requests         float64 `json:"requests"`
	Failed           float64 `json:"failed"`
}

// State reads what a session was after an event, nil for its last one, with the blocks of all pages.
func (c *Client) State(ctx context.Context, session string, at *uint32) (Doc[State], error) {
	q := AsOf{At: at}.into(url.Values{"pageSize": {"200"}})
	var all map[string]json.RawMessage
	blocks, incomplete := []json.RawMessage{}, []json.RawMessage{}
	for {
		var page map[string]json.RawMessage
		var list, without []json.RawMessage
		var next string
		err := c.get(ctx, &page, q, "api", "sessions", session, "state")
		for field, into := range map[string]any{"blocks": &list, "incompleteText": &without, "nextPageToken": &next} {
			if err == nil && page[field] != nil {
				err = json.Unmarshal(page[field], into)
			}
		}
		if err != nil {
			return Doc[State]{}, err
		}
		if all == nil {
			all = page
		}
		blocks, incomplete = append(blocks, list...), append(incomplete, without...)
		if next == "" {
			break
		}
		q.Set("pageToken", next)
	}
	delete(all, "nextPageToken")
	var out Doc[State]
	var err error
	for field, list := range map[string][]json.RawMessage{"blocks": blocks, "incompleteText": incomplete} {
		if all[field], err = encode(list); err != nil {
			return out, err
		}
	}
	raw, err := encode(all)
	if err != nil {
		return out, err
	}
	return out, json.Unmarshal(raw, &out)
}

// Diff is what changed between two events of a session.
type Diff struct {
	From   uint32 `json:"from"`
	To     uint32 `json:"to"`
	Blocks []struct {
		Change string       `json:"change"`
		Block  events.Block `json:"block"`
	} `json:"blocks"`
	BlockCount uint32 `json:"blockCount"`
	Statuses   []struct {
		Kind string `json:"kind"`
		ID   string `json:"id"`
		From string `json:"from"`
		To   string `json:"to"`
	} `json:"statuses"`
	Reported Total `json:"reported"`
	Metered  Total `json:"metered"`
	Files    struct {
		Summary string     `json:"summary"`
		Files   []FileDiff `json:"files"`
		Count   uint32     `json:"fileCount"`
		Cut     bool       `json:"cut"`
		// SnapshotGone says that the files could not be compared.
		SnapshotGone bool `json:"snapshotGone"`
	} `json:"files"`
}

// Equal reports whether the diff shows no difference. Files that could not be compared count as one.
func (d Diff) Equal() bool {
	return len(d.Statuses) == 0 && d.BlockCount == 0 && d.Reported == Total{} && d.Metered == Total{} && d.Files.Count == 0 && !d.Files.SnapshotGone
}

// FileDiff is a file that differs.
type FileDiff struct {
	Path    string       `json:"path"`
	Change  string       `json:"change"`
	Text    string       `json:"text"`
	Omitted string       `json:"omitted"`
	From    *FileVersion `json:"from"`
	To      *FileVersion `json:"to"`
}

// FileVersion is a file on one side of a Diff.
type FileVersion struct {
	Kind   string  `json:"kind"`
	Size   float64 `json:"size"`
	Mode   uint32  `json:"mode"`
	SHA256 string  `json:"sha256"`
	Target string  `json:"target"`
}

// Diff compares two events of a session.
func (c *Client) Diff(ctx context.Context, session string, from, to uint32) (Doc[Diff], error) {
	var out Doc[Diff]
	q := url.Values{"from": {strconv.FormatUint(uint64(from), 10)}, "to": {strconv.FormatUint(uint64(to), 10)}}
	err := c.get(ctx, &out, q, "api", "sessions", session, "diff")
	return out, err
}

// Comparison is the first difference of two sessions.
type Comparison struct {
	Equal     bool         `json:"equal"`
	Events    uint32       `json:"equalEvents"`
	Summary   string       `json:"summary"`
	Field     string       `json:"field"`
	Event     *events.Wire `json:"event"`
	WithEvent *events.Wire `json:"withEvent"`
	Fork      bool         `json:"fork"`
}

// Compare finds the first event at which two sessions differ.
func (c *Client) Compare(ctx context.Context, session, with string) (Doc[Comparison], error) {
	var out Doc[Comparison]
	err := c.get(ctx, &out, filter("with", with), "api", "sessions", session, "compare")
	return out, err
}
