package permission

import (
	"path"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// wrapperProgram describes the options of a program, such as sudo, that starts another program which its arguments
// name.
type wrapperProgram struct {
	values      string // letters of the options that take a value
	queries     string // letters of the options with which it starts nothing
	unreadable  string // letters of the options with which the command is not known
	arguments   int    // arguments before the command
	assignments bool   // NAME=VALUE may come before the command
}

// wrapperPrograms are the known programs, such as sudo, that start another program which their arguments name.
var wrapperPrograms = map[string]wrapperProgram{
	"sudo":    {values: "CDghpRrTtUu", assignments: true},
	"doas":    {values: "aCu"},
	"env":     {values: "Cu", unreadable: "S", assignments: true},
	"nohup":   {},
	"setsid":  {},
	"time":    {values: "fo"},
	"nice":    {values: "n"},
	"ionice":  {values: "cn"},
	"chrt":    {arguments: 1},
	"stdbuf":  {values: "eio"},
	"timeout": {values: "ks", arguments: 1},
	"xargs":   {values: "adEILnPs"},
	"exec":    {values: "a"},
	"command": {queries: "vV"},
	"builtin": {},
	"busybox": {},
	"chroot":  {arguments: 1},
}

// shellPrograms are the shells, which run the script of their option -c.
var shellPrograms = []string{"ash", "bash", "dash", "ksh", "sh", "zsh"}

// startsOtherPrograms reports whether a program, such as sudo or bash, runs commands that its arguments name.
func startsOtherPrograms(program string) bool {
	_, wraps := wrapperPrograms[program]
	return wraps || slices.Contains(shellPrograms, program) || slices.Contains([]string{"eval", "source", ".", "trap", "find"}, program)
}

// addCalls adds the commands of a script that is nested in depth other scripts.
func (s *shellScript) addCalls(f *syntax.File, depth int) {
	syntax.Walk(f, func(n syntax.Node) bool {
		switch c := n.(type) {
		case *syntax.Stmt:
			s.addStatement(c, depth)
		case *syntax.Redirect:
			// Bash expands the file of >& twice, also if it is quoted.
			if (c.Op == syntax.DplOut || c.Op == syntax.DplIn) && strings.ContainsAny(readWord(c.Word).text, "$`") {
				s.opaque = true
			}
		case *syntax.CoprocClause:
			s.opaque = true // shells differ in what is its name and what its command
		case *syntax.DeclClause:
			s.calls = append(s.calls, []commandWord{{text: c.Variant.Value, literal: true}})
		}
		return true
	})
}

// addStatement adds the commands of a statement of the script.
func (s *shellScript) addStatement(stmt *syntax.Stmt, depth int) {
	if c, ok := stmt.Cmd.(*syntax.CallExpr); ok && len(c.Args) > 0 {
		s.addCall(readWords(c.Args), depth)
	}
}

// addNestedScript adds the commands of a script that is the argument w of a command such as eval.
func (s *shellScript) addNestedScript(w commandWord, depth int) {
	if f := parseScript(w.text); w.literal && f != nil && depth < maxNestedScripts {
		s.addCalls(f, depth+1)
	} else {
		s.opaque = true
	}
}

// addCall adds a command and the commands that it starts.
func (s *shellScript) addCall(command []commandWord, depth int) {
	if !command[0].literal || command[0].tilde && !strings.Contains(command[0].text, "/") || depth > maxNestedScripts || len(s.calls) == maxCalls {
		s.opaque = true
		return
	}
	s.calls = append(s.calls, command)
	program, arguments := path.Base(command[0].text), command[1:]
	switch w, wraps := wrapperPrograms[program]; {
	case wraps:
		s.addWrappedCommand(w, arguments, depth)
	case slices.Contains(shellPrograms, program):
		s.addShellScript(arguments, depth)
	case program == "eval":
		texts, literal := make([]string, len(arguments)), true
		for i, a := range arguments {
			texts[i], literal = a.text, literal && a.literal
		}
		s.addNestedScript(commandWord{text: strings.Join(texts, " "), literal: literal}, depth)
	case program == "trap" && len(arguments) > 1:
		s.addNestedScript(arguments[0], depth)
	case (program == "source" || program == ".") && len(arguments) > 0 && !namesExistingFile(arguments[0]):
		s.opaque = true
	case program == "find":
		for i, a := range arguments[:max(len(arguments)-1, 0)] {
			if slices.Contains([]string{"-exec", "-execdir", "-ok", "-okdir"}, a.text) {
				s.addCall(arguments[i+1:], depth+1)
			}
		}
	}
}

// namesExistingFile reports whether a word can only name a file that exists before the script runs.
func namesExistingFile(w commandWord) bool {
	return w.literal && !strings.HasPrefix(w.text, "/dev/") && w.text != "-"
}

// addWrappedCommand adds the command that a wrapper program starts. After an option that may or may not have a value,
// such as --user, it adds both possible commands.
func (s *shellScript) addWrappedCommand(w wrapperProgram, arguments []commandWord, depth int) {
	first, last, n := w.arguments, w.arguments, 0 // n is the number of words before that are no options
	for i := 0; i < len(arguments) && n <= last; i++ {
		a := arguments[i]
		switch {
		case !a.literal:
			s.opaque = true
			return
		case a.text == "--", a.text == "-": // the latter is an option of env
		case strings.HasPrefix(a.text, "--"):
			s.opaque = s.opaque || w.unreadable != "" && strings.HasPrefix(a.text, "--s") // --split-string
			if !strings.Contains(a.text, "=") {
				last++
			}
		case strings.HasPrefix(a.text, "-"):
			letter := strings.IndexAny(a.text[1:], w.values+w.queries+w.unreadable) + 1
			switch {
			case letter == 0:
			case strings.IndexByte(w.queries, a.text[letter]) >= 0:
				return
			case strings.IndexByte(w.unreadable, a.text[letter]) >= 0:
				s.opaque = true
				return
			case letter == len(a.text)-1:
				i++ // the value is the next word
			}
		case w.assignments && strings.Contains(a.text, "="):
		default:
			if n >= first {
				s.addCall(arguments[i:], depth+1)
			}
			n++
		}
	}
}

// addShellScript adds the commands of the script that a shell program runs.
func (s *shellScript) addShellScript(arguments []commandWord, depth int) {
	isScript := false
	for i := 0; i < len(arguments); i++ {
		a := arguments[i]
		option := len(a.text) > 1 && (a.text[0] == '-' || a.text[0] == '+')
		switch {
		case !a.literal && !isScript:
			s.opaque = true
			return
		case a.literal && a.text == "--":
		case a.literal && option && strings.HasPrefix(a.text, "--"):
			if a.text == "--rcfile" || a.text == "--init-file" {
				i++
			}
		case a.literal && option:
			isScript = isScript || a.text[0] == '-' && strings.Contains(a.text, "c")
			s.opaque = s.opaque || a.text[0] == '-' && strings.Contains(a.text, "s") // reads its input
			if strings.HasSuffix(a.text, "o") || strings.HasSuffix(a.text, "O") {
				i++
			}
		case isScript:
			s.addNestedScript(a, depth)
			return
		case !namesExistingFile(a):
			s.opaque = true
			return
		default:
			return // a file, whose commands are not known
		}
	}
	s.opaque = true // the shell reads the script from its input
}
