package skill

import "strings"

// PromptBudget is the default maximum size in bytes of skills in a system prompt; if they are larger, the prompt has
// only their names and descriptions.
const PromptBudget = 12_000

// PromptSkill is a skill that a system prompt offers to an agent.
type PromptSkill struct {
	Name        string
	Description string
	Dir         string // path in the sandbox; "" if only its document is available
	Document    string // complete text of SKILL.md
}

// FormatPrompt returns the part of a system prompt about an agent's skills: each SKILL.md without its front matter. If
// these exceed the budget, each description follows instead, with the instruction to read SKILL.md before use. A skill
// without Dir keeps its document, because the agent cannot read it later. A budget of 0 means PromptBudget; no skills
// give "".
func FormatPrompt(list []PromptSkill, budget int) string {
	if len(list) == 0 {
		return ""
	}
	if budget == 0 {
		budget = PromptBudget
	}
	full := formatSkills(list, "", func(s PromptSkill) string { return withoutFrontMatter(s.Document) })
	if len(full) <= budget {
		return full
	}
	const note = "Before you use a skill, read SKILL.md in its LOCATION.\n\n"
	return formatSkills(list, note, func(s PromptSkill) string {
		if s.Dir == "" {
			return withoutFrontMatter(s.Document)
		}
		return strings.TrimSpace(s.Description)
	})
}

func formatSkills(list []PromptSkill, note string, say func(PromptSkill) string) string {
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

// withoutFrontMatter returns the text of SKILL.md after its front matter.
func withoutFrontMatter(document string) string {
	_, body, _ := splitFrontMatter(document)
	return strings.TrimSpace(body)
}
