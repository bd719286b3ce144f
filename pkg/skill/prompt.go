package skill

import "strings"

// PromptBudget is how many bytes skills may take in a system prompt before only
// their names and descriptions stand there.
const PromptBudget = 12_000

// Prompted is a skill that an agent is told of.
type Prompted struct {
	Name        string
	Description string
	Dir         string // where it lies in the sandbox; "" where only its document is there
	Document    string // SKILL.md as it is
}

// Prompt is what a system prompt says of an agent's skills: each SKILL.md without
// its front matter, or, over the budget, of each its description alone, and that
// SKILL.md is to be read before use. A skill that lies nowhere keeps its document,
// since it cannot be read later. A budget of 0 means PromptBudget; no skills give "".
func Prompt(list []Prompted, budget int) string {
	if len(list) == 0 {
		return ""
	}
	if budget == 0 {
		budget = PromptBudget
	}
	full := prompt(list, "", func(s Prompted) string { return body(s.Document) })
	if len(full) <= budget {
		return full
	}
	const note = "Before you use a skill, read SKILL.md in its LOCATION.\n\n"
	return prompt(list, note, func(s Prompted) string {
		if s.Dir == "" {
			return body(s.Document)
		}
		return strings.TrimSpace(s.Description)
	})
}

func prompt(list []Prompted, note string, say func(Prompted) string) string {
	var b strings.Builder
	b.WriteString("## Available Skills\n\n" + note)
	for i, s := range list {
		if i > 0 {
			b.WriteString("\n")
		}
		b.WriteString("### SKILL: " + s.Name + "\n")
		if s.Dir != "" {
			b.WriteString("LOCATION: " + strings.TrimRight(s.Dir, "/") + "/\n")
		}
		b.WriteString("\n" + say(s) + "\n")
	}
	return b.String()
}

// body is a document without its front matter.
func body(document string) string {
	_, body, _ := split(document)
	return strings.TrimSpace(body)
}
