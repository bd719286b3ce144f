package builtin

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/model"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/pkg/events"
)

// toolCall is a tool call that the model requested and whose result is not in the transcript yet.
type toolCall struct {
	model.Call
	tool    tool.Tool
	ref     string // the block of its result
	request string // the id of its permission request
	waiting bool   // a person decides
}

// callRunner runs the tool calls of one answer of the model, one at a time.
type callRunner struct {
	*turn
	cut  bool        // the token limit cut the answer
	open []*toolCall // calls whose permission was requested and that were not run, in the order of the answer
}

// runCalls runs the tool calls of an answer in order, and adds their results to the transcript. While a call waits for a person's decision, the
// others run. When ctx ends, runCalls returns although calls are left. An error means that the transcript cannot be written.
func (t *turn) runCalls(ctx context.Context, answer model.Answer) error {
	r := callRunner{turn: t, cut: answer.Cut}
	for _, call := range answer.Message.Calls {
		if ctx.Err() != nil {
			break
		}
		if err := r.beginCall(call); err != nil {
			return err
		}
		// A reply comes at once, also if a person decides.
		if err := r.serveReplies(ctx, func(c *toolCall) bool { return c.waiting }); err != nil {
			return err
		}
	}
	if err := r.serveReplies(ctx, func(*toolCall) bool { return false }); err != nil {
		return err
	}
	return r.finishInterruptedCalls(ctx)
}

// beginCall requests the permission for a call. If the call cannot run, because its tool or its arguments are invalid, beginCall adds the failure
// as its result.
func (r *callRunner) beginCall(call model.Call) error {
	c := &toolCall{Call: call, ref: r.record.OpenBlock(events.Block{Kind: events.KindToolResult, ToolUseID: call.ID})}
	failed := r.runRecovered(c, func() tool.Result {
		if err := call.ArgumentsError(r.cut); err != nil {
			return tool.Result{Code: tool.ExecutionError, Output: err.Error()}
		}
		i := slices.IndexFunc(r.tools, func(tl tool.Tool) bool { return tl.Name() == call.Name })
		if i < 0 {
			return tool.Result{Code: tool.ExecutionError, Output: fmt.Sprintf("there is no tool %q", call.Name)}
		}
		c.tool = r.tools[i]
		paths, err := c.tool.Paths(call.Arguments)
		if err != nil {
			return tool.Result{Code: tool.ExecutionError, Output: err.Error()}
		}
		request := r.permissionRequest(c.tool, call.Arguments, paths)
		request.ToolUseID = call.ID
		c.request = r.permits.sendRequest(request)
		return tool.Result{}
	})
	if failed.Code != "" {
		return r.finishCall(c, failed, 0)
	}
	r.open = append(r.open, c)
	return nil
}

// serveReplies receives and applies replies to permission requests until mayStayOpen returns true for every open call, or ctx ends.
func (r *callRunner) serveReplies(ctx context.Context, mayStayOpen func(*toolCall) bool) error {
	for slices.ContainsFunc(r.open, func(c *toolCall) bool { return !mayStayOpen(c) }) {
		reply, ok := r.permits.nextReply(ctx)
		if !ok {
			return nil
		}
		if err := r.applyReply(ctx, reply); err != nil {
			return err
		}
	}
	return nil
}

// applyReply runs the call that a permission reply allows, or adds the denial as the call's result. It ignores a reply to a request that is not
// open.
func (r *callRunner) applyReply(ctx context.Context, reply permissionReply) error {
	i := slices.IndexFunc(r.open, func(c *toolCall) bool { return c.request == reply.ID })
	if i < 0 {
		return nil
	}
	c := r.open[i]
	if reply.Waiting {
		c.waiting = true
		return nil
	}
	r.open = slices.Delete(r.open, i, i+1)
	start := r.Now()
	result := r.runRecovered(c, func() tool.Result { return c.run(ctx, reply) })
	return r.finishCall(c, result, r.Now().Sub(start))
}

// run runs the tool call if the permission reply allows it, and returns the result.
func (c *toolCall) run(ctx context.Context, reply permissionReply) tool.Result {
	if !reply.Allowed {
		return tool.Result{Code: tool.PermissionDenied, Output: reply.Message}
	}
	if len(reply.Arguments) == 0 {
		return c.tool.Run(ctx, c.Arguments)
	}
	var result tool.Result
	if err := c.checkArguments(reply.Arguments); err != nil {
		result = tool.Result{Code: tool.ExecutionError, Output: err.Error()}
	} else {
		result = c.tool.Run(ctx, reply.Arguments)
	}
	result.Output = argumentsChangedNote(reply.Arguments) + result.Output
	return result
}

// checkArguments returns an error if the arguments that a person changed are not valid JSON for the tool. The tool itself checks whether their
// paths are in the workspace.
func (c *toolCall) checkArguments(arguments json.RawMessage) error {
	if !bytes.HasPrefix(bytes.TrimSpace(arguments), []byte("{")) {
		return fmt.Errorf("arguments: not a JSON object")
	}
	_, err := c.tool.Paths(arguments)
	return err
}

// runRecovered calls f and returns its result. If f panics, the result is a failure.
func (r *callRunner) runRecovered(c *toolCall, f func() tool.Result) (result tool.Result) {
	defer func() {
		if p := recover(); p != nil {
			r.Log.Error("panic in a tool", "name", c.Name, "panic", p)
			result = tool.Result{Code: tool.ExecutionError, Output: fmt.Sprintf("the tool itself failed: %v", p)}
		}
	}()
	return f()
}

// finishCall completes the block of a call, and adds the result of the call to the transcript.
func (r *callRunner) finishCall(c *toolCall, result tool.Result, took time.Duration) error {
	r.Log.Debug("tool", "name", c.Name, "call", c.ID, "code", result.Code, "took", took)
	text := result.ModelText()
	r.record.CompleteBlock(c.ref, events.Block{
		Output: text, IsError: result.Code != "", DurationMs: uint32(took.Milliseconds()), Anchor: nextAnchor(r.said), //nolint:gosec // a minute
	})
	return r.said.AppendMessage(model.Message{Role: model.RoleTool, CallID: c.ID, Text: text})
}

// finishInterruptedCalls finishes the open calls if the user interrupted the turn. If the process ends for another reason, the calls stay open:
// nobody has decided about them, and the transcript must not say so.
func (r *callRunner) finishInterruptedCalls(ctx context.Context) error {
	if !isInterrupted(ctx) {
		return nil
	}
	for _, c := range r.open {
		if err := r.finishCall(c, tool.Result{Code: tool.ExecutionError, Output: interruptedBeforeRun}, 0); err != nil {
			return err
		}
	}
	return nil
}
