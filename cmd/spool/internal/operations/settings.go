package operations

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// Setting is one setting of a program.
type Setting struct {
	Flag     string // with its dashes
	Variable string // "" for a flag alone
	Default  string
	Required bool
	Help     string
}

// commandLine is one command of spool.
type commandLine struct {
	Name, Help string
	Settings   []Setting
}

// settingsOf reads the flags of what kong would parse into.
func settingsOf(cli any) ([]Setting, error) {
	parser, err := kong.New(cli)
	if err != nil {
		return nil, fmt.Errorf("operations: %T: %w", cli, err)
	}
	return flags(parser.Model.Node), nil
}

// commandsOf reads the commands of a program, each with its own flags.
func commandsOf(cli any) ([]commandLine, error) {
	parser, err := kong.New(cli)
	if err != nil {
		return nil, fmt.Errorf("operations: %T: %w", cli, err)
	}
	var list []commandLine
	for _, n := range parser.Model.Children {
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

// cell is text inside a table.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// code is a literal inside a table; nothing for none.
func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + cell(s) + "`"
}
