package claudecode

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// skillLoad is an open skill_load block.
type skillLoad struct {
	block        string
	conversation string
	name         string
}

// skillFolder is the text before the folder of a skill, in the message with which the CLI gives the skill's instructions to the model.
const skillFolder = "Base directory for this skill: "

// beginSkillLoad opens the block of a skill that a successful call of a conversation has loaded, if the tool is Skill. The CLI prints the folder of
// the skill after the call's result.
func (s *session) beginSkillLoad(conversation, callID string, c runningCall, t *agent.Turn) {
	name := parseToolArguments(c.input).Skill
	if c.name != "Skill" || name == "" {
		return
	}
	block := t.OpenBlock(conversation, events.Block{Kind: events.KindSkillLoad, ToolUseID: callID, Skill: &events.LoadedSkill{Name: name}})
	s.turn.skills = append(s.turn.skills, skillLoad{block, conversation, name})
}

// completeSkillLoad completes the block of a skill if text, a message of the CLI to the model, has the skill's folder. The end of the turn completes
// the blocks of skills that have none.
func (s *session) completeSkillLoad(conversation, text string, t *agent.Turn) {
	line, _, _ := strings.Cut(text, "\n")
	path, ok := strings.CutPrefix(line, skillFolder)
	if !ok {
		return
	}
	i := slices.IndexFunc(s.turn.skills, func(l skillLoad) bool {
		return l.conversation == conversation && l.name[strings.LastIndex(l.name, ":")+1:] == filepath.Base(path) // a plugin's skill is plugin:name
	})
	if i < 0 {
		return
	}
	load := s.turn.skills[i]
	s.turn.skills = slices.Delete(s.turn.skills, i, i+1)
	if target, err := os.Readlink(path); err == nil {
		path = target // definitionFiles links the skills of the launch
	}
	t.CompleteBlock(load.block, func(b *events.Block) { b.Skill = s.launch.LoadedSkill(load.name, path) })
}
