package permission

import (
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"mvdan.cc/sh/v3/syntax"
)

// Limits of scripts that are parsed. Linux starts no command with a longer argument; the parser is recursive.
const (
	maxScript  = 128 << 10 // bytes
	maxDepth   = 500       // brackets that are open at the same time
	maxCalls   = 2000      // commands of a script for deny and ask rules
	maxScripts = 8         // scripts inside of scripts, as in eval and sh -c
)

// word is a word of a command.
type word struct {
	text    string
	literal bool // the shell passes the text as it is; otherwise the text is not known before the script runs
	tilde   bool // the shell may expand the first character
}

// script is what a shell command runs. Allow rules look at commands, and deny and ask rules at calls.
type script struct {
	// commands are the simple commands, including those in substitutions. They are nil if the script has anything other
	// than simple commands with words, pipelines, lists, conditions and loops.
	commands [][]word
	// simple means that the script is one command of commands, without substitutions of commands and input.
	simple bool
	// calls are all commands that the script may run, also those that other commands start, such as sudo.
	calls [][]word
	// opaque means that the script may also run commands that are not known.
	opaque bool
}

// parse returns the syntax tree of a script, or nil if it cannot be parsed.
func parse(text string) *syntax.File {
	if len(text) > maxScript || !utf8.ValidString(text) || strings.Contains(text, "\\\r\n") { // the parser takes the latter for a line that goes on
		return nil
	}
	depth := 0
	for i := range len(text) {
		switch text[i] {
		case '(', '[', '{':
			if depth++; depth > maxDepth {
				return nil
			}
		case ')', ']', '}':
			depth = max(depth-1, 0)
		}
	}
	f, err := syntax.NewParser(syntax.Variant(syntax.LangBash), syntax.KeepComments(true)).Parse(strings.NewReader(text), "")
	if err != nil || strings.Contains(text, "\\\n") && continuesComment(f, text) {
		return nil
	}
	return f
}

// continuesComment reports whether a comment ends with a backslash. For a shell the next line is not part of the comment, but
// for the parser it is.
func continuesComment(f *syntax.File, text string) bool {
	found := false
	syntax.Walk(f, func(n syntax.Node) bool {
		if c, ok := n.(*syntax.Comment); ok {
			start := int(c.Hash.Offset())
			if start >= len(text) || text[start] != '#' {
				found = true
				return false
			}
			line, _, _ := strings.Cut(text[start:], "\n")
			found = found || strings.HasSuffix(line, "\\")
		}
		return !found
	})
	return found
}

// analyze returns what a shell command runs. It reads the command as Bash does.
func analyze(command string) *script {
	s := &script{}
	f := parse(command)
	if f == nil {
		s.opaque = true
		return s
	}
	s.addCalls(f, 0)
	s.commands, s.simple = plainCommands(command, f)
	if s.simple {
		if inner, ok := shellArgument(s.commands[0]); ok {
			s.commands, s.simple = plainCommands(inner, parse(inner))
		}
	}
	return s
}

// shellArgument returns the script of the command bash -c SCRIPT, in which some agents wrap every command.
func shellArgument(command []word) (string, bool) {
	if len(command) != 3 || !command[0].literal || !command[1].literal || !command[2].literal {
		return "", false
	}
	switch command[0].text {
	case "bash", "/bin/bash", "/usr/bin/bash", "sh", "/bin/sh", "/usr/bin/sh":
		return command[2].text, command[1].text == "-c" || command[1].text == "-lc"
	}
	return "", false
}

// plainReader collects the commands of a script for allow rules. Its methods report whether a part of the script has only
// constructs whose commands are known.
type plainReader struct {
	commands [][]word
	simple   bool
}

// plainCommands returns script.commands and script.simple.
func plainCommands(text string, f *syntax.File) ([][]word, bool) {
	if f == nil || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r == 0x7f }) {
		return nil, false // shells read control characters in different ways
	}
	if strings.Contains(text, "\\\n") && strings.Contains(text, "#") {
		return nil, false // see continuesComment
	}
	p := plainReader{simple: true}
	if !p.stmts(f.Stmts) || len(p.commands) > 1 && slices.ContainsFunc(p.commands, changesCommands) {
		return nil, false
	}
	return p.commands, p.simple && len(p.commands) == 1
}

// changesCommands reports whether a command can change which programs the names of later commands start.
func changesCommands(command []word) bool {
	switch command[0].text {
	case "printf":
		return len(command) > 1 && (!command[1].literal || strings.HasPrefix(command[1].text, "-v"))
	case "alias", "enable", "getopts", "hash", "mapfile", "read", "readarray", "wait":
		return true
	}
	return false
}

func (p *plainReader) stmts(list []*syntax.Stmt) bool {
	for _, s := range list {
		if !p.stmt(s) {
			return false
		}
	}
	return len(list) > 0
}

func (p *plainReader) stmt(s *syntax.Stmt) bool {
	if s.Coprocess || s.Disown {
		return false
	}
	for _, r := range s.Redirs {
		if !p.redirect(r) {
			return false
		}
	}
	call, isCall := s.Cmd.(*syntax.CallExpr)
	if !isCall || s.Background || s.Negated {
		p.simple = false
	}
	switch c := s.Cmd.(type) {
	case *syntax.CallExpr:
		return p.call(call)
	case *syntax.BinaryCmd:
		return p.stmt(c.X) && p.stmt(c.Y)
	case *syntax.Subshell:
		return p.stmts(c.Stmts)
	case *syntax.Block:
		return p.stmts(c.Stmts)
	case *syntax.IfClause:
		for ; c != nil; c = c.Else {
			if len(c.Cond) > 0 && !p.stmts(c.Cond) || !p.stmts(c.Then) {
				return false
			}
		}
		return true
	case *syntax.WhileClause:
		return p.stmts(c.Cond) && p.stmts(c.Do)
	}
	return false // among others functions, loops over words and tests, which assign variables or evaluate words
}

func (p *plainReader) call(c *syntax.CallExpr) bool {
	if len(c.Assigns) > 0 || len(c.Args) == 0 {
		return false
	}
	for _, w := range c.Args {
		if !p.word(w) {
			return false
		}
	}
	p.commands = append(p.commands, readWords(c.Args))
	return true
}

func (p *plainReader) word(w *syntax.Word) bool { return w == nil || p.parts(w.Parts) }

func (p *plainReader) parts(list []syntax.WordPart) bool {
	for _, part := range list {
		ok := false
		switch x := part.(type) {
		case *syntax.Lit, *syntax.SglQuoted:
			ok = true
		case *syntax.DblQuoted:
			ok = p.parts(x.Parts)
		case *syntax.ParamExp:
			// Other expansions can assign variables or evaluate their values.
			ok = x.Param != nil && x.Flags == nil && !x.Excl && !x.Length && !x.Width && !x.IsSet && x.Split == 0 && x.GlobSubst == 0 &&
				x.RcExpand == 0 && x.NestedParam == nil && x.Index == nil && x.Modifiers == nil && x.Slice == nil && x.Repl == nil && x.Names == 0 && x.Exp == nil
		case *syntax.CmdSubst:
			p.simple = false
			ok = !x.TempFile && !x.ReplyVar && p.stmts(x.Stmts)
		case *syntax.ProcSubst:
			p.simple = false
			ok = p.stmts(x.Stmts)
		}
		if !ok {
			return false
		}
	}
	return true
}

var delimiter = regexp.MustCompile(`^[A-Za-z0-9_]+$`)

// redirect reports whether a redirection writes no file and connects to nothing.
func (p *plainReader) redirect(r *syntax.Redirect) bool {
	if r.N != nil && strings.Trim(r.N.Value, "0123456789") != "" {
		return false // assigns a variable
	}
	target := readWord(r.Word)
	switch r.Op {
	case syntax.DplIn, syntax.DplOut:
		return target.literal && target.text != "" && strings.Trim(target.text, "0123456789-") == ""
	case syntax.RdrOut, syntax.AppOut, syntax.RdrClob, syntax.RdrAll, syntax.AppAll:
		return target.literal && target.text == "/dev/null"
	}
	p.simple = false
	switch r.Op {
	case syntax.RdrIn:
		return target.literal && !strings.HasPrefix(target.text, "/dev/tcp/") && !strings.HasPrefix(target.text, "/dev/udp/")
	case syntax.Hdoc, syntax.DashHdoc:
		// Shells agree on the end of the text only for such delimiters.
		return target.literal && delimiter.MatchString(target.text) && p.word(r.Hdoc)
	case syntax.WordHdoc:
		return p.word(r.Word)
	}
	return false
}

func readWords(list []*syntax.Word) []word {
	out := make([]word, len(list))
	for i, w := range list {
		out[i] = readWord(w)
	}
	return out
}

// readWord returns a word of the script.
func readWord(w *syntax.Word) word {
	var b strings.Builder
	out := word{literal: true}
	if w == nil {
		return word{}
	}
	for i, part := range w.Parts {
		switch x := part.(type) {
		case *syntax.Lit:
			text, ok := unescape(x.Value, "")
			if !ok && x.Value != "[" {
				out.literal = false
			}
			if i == 0 && text != "" && (x.Value[0] == '~' || x.Value[0] == '=') {
				out.tilde = true
			}
			b.WriteString(text)
		case *syntax.SglQuoted:
			if x.Dollar {
				out.literal = false
			}
			b.WriteString(x.Value)
		case *syntax.DblQuoted:
			if x.Dollar {
				out.literal = false
			}
			for _, inner := range x.Parts {
				lit, ok := inner.(*syntax.Lit)
				if !ok {
					out.literal = false
					continue
				}
				text, _ := unescape(lit.Value, "\"\\$`")
				b.WriteString(text)
			}
		default:
			out.literal = false
		}
	}
	out.text = b.String()
	return out
}

// unescape removes the backslashes of a literal. With quoted it is inside of double quotes, where a backslash escapes only
// these characters. It reports whether the literal has no pattern that the shell expands.
func unescape(s, quoted string) (string, bool) {
	if !strings.ContainsAny(s, `\*?[{}`) {
		return s, true
	}
	var b strings.Builder
	ok := true
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '\\' && i+1 < len(s) && s[i+1] == '\n':
			i++ // continues the line
		case c == '\\' && i+1 < len(s) && (quoted == "" || strings.IndexByte(quoted, s[i+1]) >= 0):
			i++
			b.WriteByte(s[i])
		case quoted == "" && strings.HasPrefix(s[i:], "{}"): // shells do not expand it
			i++
			b.WriteString("{}")
		case quoted == "" && strings.IndexByte("*?[{}", c) >= 0:
			ok = false
			b.WriteByte(c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String(), ok
}
