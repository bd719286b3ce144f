package agent_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

func TestModelErrorCode_NamesAContextThatIsTooLong(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.": agent.CodeContextExceeded,
		"prompt is too long: 210000 tokens > 200000 maximum":                                                  agent.CodeContextExceeded,
		"The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).":             agent.CodeContextExceeded,
		"the request exceeds the available context size, try increasing it":                                   agent.CodeContextExceeded,
		"Session too large to compact - context exceeds model limit even after stripping media":               agent.CodeContextExceeded, // of OpenCode
		"contextWindowExceeded": agent.CodeContextExceeded,
		"Your input exceeds the context window of this model. Please adjust your input and try again.": agent.CodeContextExceeded,
		"Please reduce the length of the messages or completion.":                                      agent.CodeContextExceeded,
		"messages[2]: content must not be empty":                                                       "MODEL_ERROR",
		"max_tokens: 5 is too large":                                                                   "MODEL_ERROR",
		"the server is overloaded":                                                                     "MODEL_ERROR",
	} {
		if got := agent.ModelErrorCode(400, text); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
		if got := agent.ModelErrorCode(429, text); got != "MODEL_RATE_LIMITED" {
			t.Errorf("status 429, %s: %s", text, got)
		}
	}
}
