package operations

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/spool/internal/command"
)

// Setting is one setting of a program: a flag, and the environment variable that sets it too.
type Setting struct {
	Flag     string // with leading dashes
	Variable string // "" if it can only be set by the flag
	Default  string
	Required bool
	Help     string
}

// commandLine is a command of the program spool, with its flags.
type commandLine struct {
	Name, Help string
	Settings   []Setting
}

// settingsOf returns the flags of a struct for kong.
func settingsOf(cli any) ([]Setting, error) {
	parser, err := kong.New(cli)
	if err != nil {
		return nil, fmt.Errorf("operations: %T: %w", cli, err)
	}
	return flags(parser.Model.Node), nil
}

// commandLines returns the commands of spool, each with its own flags.
func commandLines() ([]commandLine, error) {
	grammar, err := command.CommandModel()
	if err != nil {
		return nil, fmt.Errorf("operations: %w", err)
	}
	var list []commandLine
	for _, n := range grammar.Children {
		list = append(list, commandLine{Name: n.Name, Help: n.Help, Settings: flags(n)})
	}
	return list, nil
}

func flags(n *kong.Node) []Setting {
	var list []Setting
	for _, f := range n.Flags {
		if f.Name == "help" || f.Hidden {
			continue
		}
		list = append(list, Setting{Flag: "--" + f.Name, Variable: strings.Join(f.Envs, ", "), Default: f.Default, Required: f.Required, Help: f.Help})
	}
	return list
}

// cell escapes text for a table.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// code returns a literal for a table, or "" for "".
func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + cell(s) + "`"
}
