package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestDockerSubagent_HasItsOwnConversation tests that a sub-agent of Claude Code that its agent's definition names
// has its own conversation: its actions and texts are there, and not in the agent's conversation.
func TestDockerSubagent_HasItsOwnConversation(t *testing.T) {
	const (
		query   = "delegate the survey"
		answer  = "The surveyor said: It said: survey-4417"
		command = "echo survey-$((4400+17))" // only a shell can compute the answer
	)
	c := newDockerCluster(t, harness.Options{})
	apply(c, "agents", "lead", map[string]any{
		"architecture": "claude-code", "model": "known-model", "instructions": "You lead a team of surveyors.",
		"subagents": []map[string]any{{
			"name": "surveyor", "description": "Surveys folders.", "instructions": "You are the surveyor.", "tools": []string{"Bash", "Read"},
		}},
	})
	k := newTalkWith(t, c, "", map[string]any{"agent": "lead"})
	x := k.mustComplete(query, answer)
	spawned, ended := onlyEvent[events.SubagentSpawned](x), onlyEvent[events.SubagentCompleted](x)
	own := spawned.Conversation
	if spawned.Name != "surveyor" || own == "" || own == events.MainConversation || spawned.Parent != events.MainConversation || ended.Conversation != own || ended.IsError {
		t.Fatalf("spawned %+v, ended %+v", spawned, ended)
	}

	list := k.conversations()
	if len(list) != 2 || list[1] != (conversation{own, events.MainConversation, "surveyor", "completed"}) {
		t.Errorf("the conversations are %+v", list)
	}
	sub := k.transcript(own)
	for _, kind := range []events.BlockKind{events.KindToolUse, events.KindToolResult, events.KindAssistantText} {
		if !slices.ContainsFunc(sub, func(b events.Block) bool { return b.Kind == kind }) {
			t.Errorf("the sub-agent's transcript has no %s: %s", kind, text(t, sub))
		}
	}
	if all := text(t, sub); !strings.Contains(all, command) || !strings.Contains(all, "It said: survey-4417") {
		t.Errorf("the sub-agent's transcript is %s", all)
	}
	for _, b := range k.transcript(events.MainConversation) {
		if b.Kind == events.KindToolUse && b.ToolName == "Bash" {
			t.Errorf("the agent's own conversation has what the sub-agent did: %s", text(t, b))
		}
	}
	k.mustComplete(query, answer) // another sub-agent, of the same process
	if list := k.conversations(); len(list) != 3 || list[2].ConversationID == own {
		t.Errorf("after a second one the conversations are %+v", list)
	}
}

// onlyEvent returns the only event of type P in a turn.
func onlyEvent[P events.Payload](x turn) (p P) {
	x.t.Helper()
	n := 0
	for _, w := range x.events {
		if w.Type != p.EventType() {
			continue
		}
		if n++; json.Unmarshal(w.Data, &p) != nil {
			x.t.Fatalf("%s: %s", w.Type, w.Data)
		}
	}
	if n != 1 {
		x.t.Fatalf("the turn has %d of %s", n, p.EventType())
	}
	return p
}

type conversation struct{ ConversationID, ParentConversationID, Name, Status string }

func (k *talk) conversations() []conversation {
	k.t.Helper()
	var got struct{ Conversations []conversation }
	k.get("/api/sessions/"+k.session+"/conversations", &got)
	return got.Conversations
}

// transcript returns the blocks of one conversation.
func (k *talk) transcript(conversation string) []events.Block {
	k.t.Helper()
	var got struct{ Blocks []events.Block }
	k.get("/api/sessions/"+k.session+"/blocks?conversationId="+conversation, &got)
	for _, b := range got.Blocks {
		if b.ConversationID != conversation {
			k.t.Errorf("among the blocks of %s is one of %s", conversation, b.ConversationID)
		}
	}
	return got.Blocks
}
