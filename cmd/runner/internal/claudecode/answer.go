package claudecode

import "strings"

// lastAnswer is the text of the last message of the model in a conversation. The CLI's own result holds only the last text block of a message.
type lastAnswer struct {
	message string // id of the message
	texts   []string
	whole   string
	gap     bool // a part that is no text came after the last text
}

// add adds a whole part of a message. A part of another message begins another answer.
func (a *lastAnswer) add(p wholePart) {
	if p.message.ID != a.message || p.message.ID == "" {
		*a = lastAnswer{message: p.message.ID}
	}
	if p.Type != "text" {
		a.gap = a.whole != ""
		return
	}
	if a.gap {
		a.whole += "\n\n"
	}
	a.texts, a.whole, a.gap = append(a.texts, p.Text), a.whole+p.Text, false
}

// lines returns the texts as contentParts.text joins them.
func (a *lastAnswer) lines() string { return strings.Join(a.texts, "\n") }

// resultText returns the result of the turn: the whole last answer of the main agent if own, the CLI's result, is only the end of it, and own
// otherwise, for example for a command that the CLI answers itself.
func (s *session) resultText(own string) string {
	main := s.turn.conversations[""]
	if main == nil {
		return own
	}
	whole, end := strings.TrimSpace(main.last.whole), strings.TrimSpace(own)
	if whole == end || !strings.HasSuffix(whole, end) {
		return own
	}
	return main.last.whole
}
