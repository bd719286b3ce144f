package e2e

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/test/e2e/harness"
)

const watchedTurn = `
rules:
  - name: two calls
    match: {user: add the numbers}
    steps:
      - tool: {name: run_code, input: {language: bash, code: 'until [ -e go ]; do sleep 0.1; done; echo $((40+2))'}}
      - tool: {name: run_code, input: {language: bash, code: 'exit 3'}}
      - text: 'The sum is 42.'
`

// TestWatch_FollowsAnExecution tests that WatchExecution shows a turn of a real agent up to its end, and that the final status,
// which was folded from events, equals the status of the ended execution, which comes from the rows of the projector.
func TestWatch_FollowsAnExecution(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: watchedTurn})
	conn, err := grpc.NewClient(c.GRPCAddress(0), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // the test has ended
	client := spoolv1.NewExecutionsClient(conn)
	// watch returns all statuses of an execution. It calls each with every one.
	watch := func(execution string, each func(*spoolv1.ExecutionStatus)) (list []*spoolv1.ExecutionStatus) {
		t.Helper()
		stream, err := client.WatchExecution(t.Context(), &spoolv1.WatchExecutionRequest{ExecutionId: execution, EveryEvents: 1})
		for err == nil {
			var m *spoolv1.ExecutionStatus
			if m, err = stream.Recv(); err == nil {
				list = append(list, m)
				each(m)
			}
		}
		if !errors.Is(err, io.EOF) || len(list) == 0 || !list[len(list)-1].Final {
			t.Fatalf("the stream ended with %v after %v", err, list)
		}
		return list
	}
	session := c.CreateSession("spool", nil)
	execution := c.PostMessage(session, "add the numbers")
	seen := false
	list := watch(execution, func(s *spoolv1.ExecutionStatus) {
		if seen || s.ToolCallCounts.Pending == 0 {
			return
		}
		seen = true
		if s.Phase != "running" || len(s.ToolCalls) != 1 || s.ToolCalls[0].ToolName != "run_code" || s.ToolCalls[0].Status != "pending" {
			t.Errorf("during the first call the status is %v", s)
		}
		if err := os.WriteFile(filepath.Join(c.WorkspaceFolder(session), "go"), nil, 0o600); err != nil { // ends the call
			t.Error(err)
		}
	})
	for i, s := range list {
		if i > 0 && s.Seq <= list[i-1].Seq || s.Final != (i == len(list)-1) {
			t.Errorf("status %d is %v", i, s)
		}
	}
	last := list[len(list)-1]
	if last.Phase != "completed" || last.GetResult() != "The sum is 42." || len(last.ToolCalls) != 2 || last.ToolCallCounts.Complete+last.ToolCallCounts.Error != 2 ||
		last.MessageCounts.User != 1 || last.MessageCounts.Assistant != 1 || last.Usage.OutputTokens == 0 {
		t.Errorf("the final status is %v", last)
	}
	again := watch(execution, func(*spoolv1.ExecutionStatus) {})
	if len(again) != 1 {
		t.Errorf("an ended execution has %d statuses", len(again))
	}
	again[0].Seq = last.Seq // events after the end, such as the one that the session is idle
	if !proto.Equal(last, again[0]) {
		t.Errorf("the final status is  %v\nfrom the rows it is %v", last, again[0])
	}
}
