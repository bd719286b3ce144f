package operations

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/spool/internal/command"
)

// Setting is a setting of a program: a flag, and the environment variable that also sets it.
type Setting struct {
	Flag     string // with leading dashes
	Variable string // "" if it can only be set by the flag
	Default  string
	Required bool
	Help     string
}

// spoolCommand is a command of the program spool, with its flags.
type spoolCommand struct {
	Name, Help string
	Settings   []Setting
}

// parseSettings returns the settings that the fields of a struct define for kong.
func parseSettings(cli any) ([]Setting, error) {
	parser, err := kong.New(cli)
	if err != nil {
		return nil, fmt.Errorf("operations: %T: %w", cli, err)
	}
	return commandFlags(parser.Model.Node), nil
}

// spoolCommands returns the commands of the program spool, each with its own flags.
func spoolCommands() ([]spoolCommand, error) {
	grammar, err := command.CLIModel()
	if err != nil {
		return nil, fmt.Errorf("operations: %w", err)
	}
	var list []spoolCommand
	for _, n := range grammar.Children {
		list = append(list, spoolCommand{Name: n.Name, Help: n.Help, Settings: commandFlags(n)})
	}
	return list, nil
}

// commandFlags returns the visible flags of a command.
func commandFlags(n *kong.Node) []Setting {
	var list []Setting
	for _, f := range n.Flags {
		if f.Name == "help" || f.Hidden {
			continue
		}
		list = append(list, Setting{Flag: "--" + f.Name, Variable: strings.Join(f.Envs, ", "), Default: f.Default, Required: f.Required, Help: f.Help})
	}
	return list
}

// escapeCell escapes a text for a cell of a Markdown table.
func escapeCell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// inlineCode returns a text as inline code for a cell of a Markdown table, or "" if the text is empty.
func inlineCode(s string) string {
	if s == "" {
		return ""
	}
	return "`" + escapeCell(s) + "`"
}
