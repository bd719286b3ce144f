package skill

import "strings"

// PromptBudget is the default size in bytes that skills may have in a system prompt; above it only their names and
// descriptions are included.
const PromptBudget = 12_000

// Prompted is a skill that is offered to an agent.
type Prompted struct {
	Name        string
	Description string
	Dir         string // path in the sandbox; "" if only its document is available
	Document    string // complete text of SKILL.md
}

// Prompt returns the part of a system prompt about an agent's skills: each SKILL.md without its front matter or,
// above the budget, each description with the instruction to read SKILL.md before use. A skill without Dir keeps
// its document, because the agent cannot read it later. A budget of 0 means PromptBudget; no skills give "".
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

// body returns a document without its front matter.
func body(document string) string {
	_, body, _ := split(document)
	return strings.TrimSpace(body)
}
