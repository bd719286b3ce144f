package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/pkg/events/history"
)

// State is a SessionState as a client reads it, with the blocks of all pages.
type State struct {
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
	} `json:"session"`
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

// ExecutionState is what a State says of an execution.
type ExecutionState struct {
	ID     string `json:"executionId"`
	Phase  string `json:"phase"`
	Result string `json:"result"`
}

// ReadState reads the state at an event, page by page; 0 is the last event. get makes a GET request.
func ReadState(get func(path string, out any) error, session string, at uint32, pageSize int) (State, error) {
	var all State
	q := url.Values{"pageSize": {fmt.Sprint(pageSize)}}
	if at > 0 {
		q.Set("at", fmt.Sprint(at))
	}
	for {
		var page State
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

// SameState reports how a state differs from the fold of the events up to it, which are list, and from what view shows, which is
// what a client has that has seen these events.
func SameState(got State, list []events.Wire, view *blocks.View) error {
	var want history.State
	phases := map[string]string{}
	for _, w := range list {
		e := w.Event()
		want = history.Evolve(want, w.Seq, e)
		phase(phases, e)
	}
	last := list[len(list)-1]
	active := ""
	if x := want.Active(); x != nil {
		active = x.ID
	}
	snapshot, taken := "", uint32(0)
	if want.Snapshot != nil {
		snapshot, taken = want.Snapshot.Name, want.Snapshot.Seq
	}
	if g, w := fmt.Sprint(got.Seq, got.Position, got.Session.Tip, got.Session.Position, got.Session.Status, got.Session.Active, got.Session.Queued, got.Session.Snapshot),
		fmt.Sprint(last.Seq, last.Position, last.Seq, last.Position, want.Session.Status, active, want.Queued(), snapshot); g != w {
		return fmt.Errorf("session at %d: %s, want %s", last.Seq, g, w)
	}
	reported := want.Reported()
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
	return sameBlocks(got, view, last.Seq)
}

func sameBlocks(got State, view *blocks.View, seq uint32) error {
	want := view.Blocks()
	for i := range want {
		if want[i].Status == events.StatusPending {
			want[i].Content = "" // text in flight is not in the log
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

// phase folds the phases of executions by their words alone.
func phase(phases map[string]string, e events.Event) {
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
