package history

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// EventNormalizer converts the events of one session into a form that can be compared with the events of another
// session. It must receive all events of the session, in order.
type EventNormalizer struct {
	session string
	names   map[string]string // replacement of each id, by kind and id
	counts  map[string]int    // number of ids seen, by kind
}

// NewEventNormalizer returns an EventNormalizer for the events of a session.
func NewEventNormalizer(session string) *EventNormalizer {
	return &EventNormalizer{session: session, names: map[string]string{}, counts: map[string]int{}}
}

// ComparableEvent is an event without the parts that always differ between two sessions.
type ComparableEvent struct {
	Type events.Type
	data map[string]any // includes the execution and the conversation
}

// Normalize returns an event without the parts that differ between sessions. ok is false for an event that is not
// compared, because it records where and when a session runs, and not what an agent or a user did.
func (r *EventNormalizer) Normalize(w events.WireEvent) (c ComparableEvent, ok bool) {
	if !isCompared(w) {
		return c, false
	}
	// Paths inside sandboxes contain the session's id.
	raw := bytes.ReplaceAll(w.Data, []byte(r.session), []byte("SESSION"))
	numbers := json.NewDecoder(bytes.NewReader(raw))
	numbers.UseNumber()
	data := map[string]any{}
	if err := numbers.Decode(&data); err != nil { // not an object: compared as text
		data = map[string]any{"": string(raw)}
	}
	data["executionId"], data["conversationId"] = w.ExecutionID, w.ConversationID
	r.normalizeValue(data)
	return ComparableEvent{w.Type, data}, true
}

// isCompared reports whether an event records what an agent or a user did. Unlisted types are compared, so that new
// types are compared by default.
func isCompared(w events.WireEvent) bool {
	switch d := w.Event().Data.(type) {
	case events.SessionIdle, events.SessionClosed, events.SessionDeleted, events.RunRetired, events.ContentRemoved,
		events.ExecutionQueued, events.ExecutionDispatched, events.ExecutionClaimed, events.ExecutionAttached, events.ExecutionHandedOver,
		events.SandboxCreating, events.SandboxReady, events.SandboxReplaced, events.SandboxTerminated, events.SandboxFailed,
		events.SandboxPaused, events.SandboxResumed, events.SandboxHealth, events.SandboxUsage, events.EgressDenied, events.ModelCalled,
		events.SyncRequested, events.WorkspaceSyncStarted, events.WorkspaceSynced, events.WorkspaceRestored, events.FilesApplied,
		events.FileCreated, events.FileModified, events.FileDeleted,
		events.TranscriptWritten, events.MetadataUpdate, events.Log, events.WatchdogWarned, events.BlockUpdate:
		return false
	case events.BlockStart: // a block_complete event follows
		return d.Block.Status != events.StatusPending && d.Block.Status != ""
	}
	return true
}

// idKinds maps each JSON member that holds an id to the kind of the id.
var idKinds = map[string]string{
	"id": "id", "blockId": "id", "executionId": "execution", "conversationId": "conversation", "subConversationId": "conversation",
	"parentConversationId": "conversation", "subagentId": "subagent", "toolUseId": "call", "approvalId": "approval",
}

// ignoredMembers lists the JSON members that always differ between two sessions: times, durations, values derived from
// them, and the place where a session runs.
var ignoredMembers = []string{"time", "timestamp", "durationMs", "waitMs", "pausedMs", "idleMs", "afterMs", "costUsd", "pid", "warm", "sealed", "object", "held", "anchor", "textAfter"}

// normalizeValue removes the members of ignoredMembers from v, recursively, and replaces ids by their kind and number.
func (r *EventNormalizer) normalizeValue(v any) {
	switch x := v.(type) {
	case []any:
		for _, e := range x {
			r.normalizeValue(e)
		}
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(x)) {
			kind, isID := idKinds[name]
			switch id, text := x[name].(string); {
			case slices.Contains(ignoredMembers, name):
				delete(x, name)
			case name == "input": // the agent's own text
			case isID && text && id != "" && id != events.MainConversation:
				x[name] = r.idReplacement(kind, id)
			default:
				r.normalizeValue(x[name])
			}
		}
	}
}

// idReplacement returns the text that replaces an id: its kind and its number among the ids of that kind.
func (r *EventNormalizer) idReplacement(kind, id string) string {
	name, ok := r.names[kind+" "+id]
	if !ok {
		r.counts[kind]++
		name = fmt.Sprint(kind, " ", r.counts[kind])
		r.names[kind+" "+id] = name
	}
	return name
}

// FirstDifference returns the path of the first member in which two events differ, for example type or data.block.content,
// or "" if they are equal.
func FirstDifference(a, b ComparableEvent) string {
	if a.Type != b.Type {
		return "type"
	}
	return differencePath("data", a.data, b.data)
}

// differencePath implements FirstDifference for two JSON values. path is the path of the values.
func differencePath(path string, a, b any) string {
	switch x := a.(type) {
	case map[string]any:
		y, ok := b.(map[string]any)
		if !ok {
			return path
		}
		names := slices.Sorted(maps.Keys(x))
		for name := range y {
			if _, ok := x[name]; !ok {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		for _, name := range names {
			if p := differencePath(path+"."+name, x[name], y[name]); p != "" {
				return p
			}
		}
		return ""
	case []any:
		y, ok := b.([]any)
		if !ok || len(x) != len(y) {
			return path
		}
		for i := range x {
			if p := differencePath(fmt.Sprintf("%s[%d]", path, i), x[i], y[i]); p != "" {
				return p
			}
		}
		return ""
	}
	if reflect.DeepEqual(a, b) {
		return ""
	}
	return path
}
