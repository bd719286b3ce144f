package claudecode

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

func TestResult_IsTheWholeTextOfTheLastMessage(t *testing.T) {
	t.Parallel()
	line := func(message, content string) string {
		return fmt.Sprintf(`{"type":"assistant","uuid":"u","message":{"id":%q,"model":"m","content":[%s]}}`, message, content)
	}
	text := func(s string) string { return fmt.Sprintf(`{"type":"text","text":%q}`, s) }
	const thinking = `{"type":"thinking","thinking":"hm"}`
	for name, c := range map[string]struct {
		lines     []string
		own, want string
	}{
		"one block":                 {[]string{line("msg_1", text("All."))}, "All.", "All."},
		"an earlier message":        {[]string{line("msg_1", text("Before.")), line("msg_2", text("After."))}, "After.", "After."},
		"adjacent blocks":           {[]string{line("msg_1", text("Four")), line("msg_1", text(" [1]."))}, " [1].", "Four [1]."},
		"blocks in one line":        {[]string{line("msg_1", text("Four")+","+text(" [1]."))}, " [1].", "Four [1]."},
		"a thought between":         {[]string{line("msg_1", text("One.")), line("msg_1", thinking), line("msg_1", text("Two."))}, "Two.", "One.\n\nTwo."},
		"a thought at the end":      {[]string{line("msg_1", text("One.")), line("msg_1", thinking)}, "", "One."},
		"trimmed by the CLI":        {[]string{line("msg_1", text("One.\n"))}, "One.", "One."},
		"the CLI's own answer":      {[]string{line("msg_1", text("One."))}, "Total cost: $0", "Total cost: $0"},
		"only a thought at the end": {[]string{line("msg_1", text("One.")), line("msg_2", thinking)}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			st := newStage(t)
			st.begin().prints(initLine).prints(c.lines...).prints(fmt.Sprintf(`{"type":"result","subtype":"success","result":%q}`, c.own))
			if got := st.ended().Result; got != c.want {
				t.Errorf("result %q, want %q", got, c.want)
			}
		})
	}
}

// A sub-agent's answer of several texts is journaled once.
func TestSubagentAnswer_OfSeveralTextsIsJournaledOnce(t *testing.T) {
	t.Parallel()
	st := newStage(t)
	st.begin().prints(initLine, startOf("t1"), mirrored("a1", metadataLine("t1", 1)),
		mirrored("a1", partLine("msg_2", textPart("One.")), partLine("msg_2", textPart("Two."))),
		`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"One."},{"type":"text","text":"Two."}]}]}}`,
		done)
	var texts []string
	for _, b := range of[events.BlockStart](st, "block_start") {
		if b.Block.Kind == events.KindAssistantText {
			texts = append(texts, b.Block.Content)
		}
	}
	if got := strings.Join(texts, "|"); got != "One.|Two." {
		t.Errorf("texts %q", got)
	}
}
