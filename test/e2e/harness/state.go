package harness

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
)

// SessionState is the state of a session as of one of its events, as a client reads it from the API, with the blocks of all
// pages.
type SessionState struct {
	Seq             uint32           `json:"seq"`
	Position        string           `json:"position"`
	Blocks          []events.Block   `json:"blocks"`
	BlockCount      int              `json:"blockCount"`
	NextPageToken   string           `json:"nextPageToken"`
	ExecutionCount  int              `json:"executionCount"`
	Executions      []ExecutionState `json:"executions"`
	ConversationSum int              `json:"conversationCount"`
	Conversations   []struct {
		ID     string `json:"conversationId"`
		Status string `json:"status"`
	} `json:"conversations"`
	Session struct {
		Status   string         `json:"status"`
		Tip      uint32         `json:"tip"`
		Position string         `json:"position"`
		Active   string         `json:"activeExecutionId"`
		Queued   uint32         `json:"queued"`
		Snapshot string         `json:"snapshot"`
		Options  map[string]any `json:"sessionOptions"`
		Sandbox  struct {
			ID    string `json:"sandboxId"`
			State string `json:"state"`
		} `json:"currentSandbox"`
	} `json:"session"`
	Todos    []history.TodoList `json:"todos"`
	Resolved struct {
		Seq         uint32 `json:"seq"`
		ExecutionID string `json:"executionId"`
	} `json:"resolved"`
	Reported struct {
		InputTokens, OutputTokens float64
	} `json:"reported"`
	Metered struct {
		Requests float64 `json:"requests"`
	} `json:"metered"`
	Files struct {
		Summary     string `json:"summary"`
		SnapshotSeq uint32 `json:"snapshotSeq"`
		Available   bool   `json:"available"`
		ChangeCount uint32 `json:"changeCount"`
		Changes     []struct {
			Seq  uint32 `json:"seq"`
			Path string `json:"path"`
		} `json:"changes"`
	} `json:"files"`
}

// ExecutionState is one execution in a SessionState.
type ExecutionState struct {
	ID     string `json:"executionId"`
	Phase  string `json:"phase"`
	Result string `json:"result"`
}

// ReadState returns the state of a session as of the event with the seq at; 0 means the last event. It reads all pages
// of pageSize blocks. get sends a GET request to a path of the REST API and decodes the response into out.
func ReadState(get func(path string, out any) error, session string, at uint32, pageSize int) (SessionState, error) {
	var all SessionState
	q := url.Values{"pageSize": {fmt.Sprint(pageSize)}}
	if at > 0 {
		q.Set("at", fmt.Sprint(at))
	}
	for {
		var page SessionState
		if err := get("/api/sessions/"+session+"/state?"+q.Encode(), &page); err != nil {
			return all, err
		}
		page.Blocks = append(all.Blocks, page.Blocks...)
		if all = page; all.NextPageToken == "" {
			return all, nil
		}
		q.Set("pageToken", all.NextPageToken)
	}
}

// ReadStateRPC is like ReadState, but reads over gRPC with client.
func ReadStateRPC(ctx context.Context, client spoolv1.SessionsClient, session string, at uint32, pageSize int) (SessionState, error) {
	var all SessionState
	q := &spoolv1.GetSessionStateRequest{SessionId: session, At: &at, PageSize: uint32(pageSize)}
	for {
		m, err := client.GetSessionState(ctx, q)
		if err != nil {
			return all, err
		}
		raw, err := protojson.Marshal(m)
		if err != nil {
			return all, err
		}
		var page SessionState
		if err := json.Unmarshal(raw, &page); err != nil {
			return all, err
		}
		for i, b := range m.GetBlocks() { // the input in JSON is an object with its text
			page.Blocks[i].Input = nil
			if text := b.GetInput().GetText(); text != "" {
				page.Blocks[i].Input = json.RawMessage(text)
			}
		}
		page.Blocks = append(all.Blocks, page.Blocks...)
		if all = page; all.NextPageToken == "" {
			return all, nil
		}
		q.PageToken = all.NextPageToken
	}
}

// CompareState compares the state got with the events and blocks that a client received up to the same event. It
// returns an error that describes a difference to the fold of the events list or to the blocks shown, and nil if there
// is none.
func CompareState(got SessionState, list []events.WireEvent, shown []events.Block) error {
	var want history.State
	phases := map[string]string{}
	for _, w := range list {
		e := w.Event()
		want = history.Evolve(want, w.Seq, e)
		updatePhase(phases, e)
	}
	last := list[len(list)-1]
	active := ""
	if x := want.ActiveExecution(); x != nil {
		active = x.ID
	}
	snapshot, taken := "", uint32(0)
	if want.Snapshot != nil {
		snapshot, taken = want.Snapshot.Name, want.Snapshot.Seq
	}
	if g, w := fmt.Sprint(got.Seq, got.Position, got.Session.Tip, got.Session.Position, got.Session.Status, got.Session.Active, got.Session.Queued, got.Session.Snapshot),
		fmt.Sprint(last.Seq, last.Position, last.Seq, last.Position, want.Session.Status, active, want.QueuedCount(), snapshot); g != w {
		return fmt.Errorf("session at %d: %s, want %s", last.Seq, g, w)
	}
	var sandbox, resolved string
	if b := want.Sandbox; b != nil {
		sandbox = b.ID + " " + b.Status
	}
	if r := want.Resolved; r != nil {
		resolved = fmt.Sprint(r.Seq, " ", r.ExecutionID)
	}
	if g := strings.TrimSpace(got.Session.Sandbox.ID + " " + got.Session.Sandbox.State); g != sandbox {
		return fmt.Errorf("sandbox at %d: %q, want %q", last.Seq, g, sandbox)
	}
	if g := fmt.Sprint(got.Resolved.Seq, " ", got.Resolved.ExecutionID); g != cmp.Or(resolved, "0 ") {
		return fmt.Errorf("resolved at %d: %q, want %q", last.Seq, g, resolved)
	}
	if g, w := fmt.Sprint(got.Todos), fmt.Sprint(want.Todos); len(got.Todos) != len(want.Todos) || len(want.Todos) == 1 && g != w {
		return fmt.Errorf("todos at %d: %s, want %s", last.Seq, g, w)
	}
	reported := want.ReportedUsage()
	if g, w := fmt.Sprint(got.Reported.InputTokens, got.Reported.OutputTokens, got.Metered.Requests, got.Files.SnapshotSeq, got.Files.ChangeCount, got.ConversationSum, len(got.Conversations)-1),
		fmt.Sprint(float64(reported.InputTokens), float64(reported.OutputTokens), float64(want.Metered.Requests), taken, want.FileChanges, want.Count.Conversations, want.Count.Conversations); g != w {
		return fmt.Errorf("sums at %d: %s, want %s", last.Seq, g, w)
	}
	if got.ExecutionCount != len(phases) || len(got.Executions) != len(phases) {
		return fmt.Errorf("%d executions at %d, %d of them listed, want %d", got.ExecutionCount, last.Seq, len(got.Executions), len(phases))
	}
	for _, x := range got.Executions {
		if x.Phase != phases[x.ID] || x.Result != "" && x.Phase != "completed" {
			return fmt.Errorf("execution %+v at %d, want phase %q", x, last.Seq, phases[x.ID])
		}
	}
	return compareBlocks(got, shown, last.Seq)
}

// compareBlocks compares the blocks of the state got with the blocks that a client shows, and returns an error that
// describes a difference. The text of an open block is compared only as far as both have it, because text and events
// reach a client independently, and a fold of events has no text of open blocks. seq is the seq of the state.
func compareBlocks(got SessionState, shown []events.Block, seq uint32) error {
	want := slices.Clone(shown)
	for i := range want {
		if want[i].Status != events.StatusPending || i >= len(got.Blocks) {
			continue
		}
		if has, had := got.Blocks[i].Content, want[i].Content; strings.HasPrefix(has, had) || strings.HasPrefix(had, has) {
			want[i].Content = has
		}
	}
	g, err := json.Marshal(got.Blocks)
	if err != nil {
		return err
	}
	w, err := json.Marshal(want)
	if err != nil {
		return err
	}
	if len(want) != got.BlockCount || len(want) > 0 && !bytes.Equal(g, w) {
		return fmt.Errorf("%d blocks at %d:\n%s\nwant %d:\n%s", got.BlockCount, seq, g, len(want), w)
	}
	return nil
}

// updatePhase updates the phases of executions, by execution id, with the event e.
func updatePhase(phases map[string]string, e events.Event) {
	x := e.ExecutionID
	switch e.Data.(type) {
	case events.MessageAccepted:
		phases[x] = "queued"
	case events.ExecutionClaimed:
		if phases[x] == "queued" {
			phases[x] = "starting"
		}
	case events.ExecutionStarted, events.ExecutionResumed:
		phases[x] = "running"
	case events.AttemptFailed:
		phases[x] = "starting"
	case events.ExecutionPaused:
		phases[x] = "paused"
	case events.ExecutionCompleted:
		phases[x] = "completed"
	case events.ExecutionFailed:
		phases[x] = "failed"
	case events.ExecutionCancelled, events.ExecutionWithdrawn:
		phases[x] = "cancelled"
	}
}
