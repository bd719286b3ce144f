package agent

// AnswerText assembles the text of the last answer of an agent, which can consist of several texts with thoughts between them. The zero value is
// ready to use.
type AnswerText struct {
	text  string
	ended bool
}

// Add adds a text to the answer, after a blank line. After End, the text begins another answer.
func (a *AnswerText) Add(text string) {
	if text == "" {
		return
	}
	if a.ended || a.text == "" {
		*a = AnswerText{text: text}
		return
	}
	a.text += "\n\n" + text
}

// End ends the answer, because a tool call or another message follows.
func (a *AnswerText) End() { a.ended = true }

// String returns the text of the last answer.
func (a *AnswerText) String() string { return a.text }
