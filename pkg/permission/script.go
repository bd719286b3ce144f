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
	maxScriptLength  = 128 << 10 // bytes
	maxOpenBrackets  = 500       // brackets that are open at the same time
	maxCalls         = 2000      // commands of a script for deny and ask rules
	maxNestedScripts = 8         // scripts inside of scripts, as in eval and sh -c
)

// commandWord is a word of a shell command.
type commandWord struct {
	text    string
	literal bool // the shell passes the text as it is; otherwise the text is not known before the script runs
	tilde   bool // the shell may expand the first character
}

// shellScript is the analysis of a shell command: the commands that it runs. Allow rules use the field commands; deny
// and ask rules use calls.
type shellScript struct {
	// commands are the simple commands, including those in substitutions. They are nil if the script has anything other
	// than simple commands with words, pipelines, lists, conditions and loops.
	commands [][]commandWord
	// simple means that the script is one command of commands, without substitutions of commands and input.
	simple bool
	// calls are all commands that the script may run, also those that other commands start, such as sudo.
	calls [][]commandWord
	// opaque means that the script may also run commands that are not known.
	opaque bool
}

// parseScript returns the syntax tree of a shell script, or nil if it cannot be parsed.
func parseScript(text string) *syntax.File {
	if len(text) > maxScriptLength || !utf8.ValidString(text) || strings.Contains(text, "\\\r\n") { // the parser takes the latter for a line that goes on
		return nil
	}
	depth := 0
	for i := range len(text) {
		switch text[i] {
		case '(', '[', '{':
			if depth++; depth > maxOpenBrackets {
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

// continuesComment reports whether a comment ends with a backslash. Shells do not treat the next line as part of the
// comment, but the parser does.
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

// analyzeScript returns the analysis of a shell command, which it parses as Bash does.
func analyzeScript(command string) *shellScript {
	s := &shellScript{}
	f := parseScript(command)
	if f == nil {
		s.opaque = true
		return s
	}
	s.addCalls(f, 0)
	s.commands, s.simple = plainCommands(command, f)
	if s.simple {
		if inner, ok := wrappedScript(s.commands[0]); ok {
			s.commands, s.simple = plainCommands(inner, parseScript(inner))
		}
	}
	return s
}

// wrappedScript returns the script of a command bash -c SCRIPT; some agents wrap every command in this way.
func wrappedScript(command []commandWord) (string, bool) {
	if len(command) != 3 || !command[0].literal || !command[1].literal || !command[2].literal {
		return "", false
	}
	switch command[0].text {
	case "bash", "/bin/bash", "/usr/bin/bash", "sh", "/bin/sh", "/usr/bin/sh":
		return command[2].text, command[1].text == "-c" || command[1].text == "-lc"
	}
	return "", false
}

// plainScriptReader collects the commands of a shell script for allow rules. Its methods report whether a part of the
// script has only constructs whose commands are known.
type plainScriptReader struct {
	commands [][]commandWord
	simple   bool
}

// plainCommands returns the values of shellScript.commands and shellScript.simple.
func plainCommands(text string, f *syntax.File) ([][]commandWord, bool) {
	if f == nil || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r == 0x7f }) {
		return nil, false // shells read control characters in different ways
	}
	if strings.Contains(text, "\\\n") && strings.Contains(text, "#") {
		return nil, false // see continuesComment
	}
	p := plainScriptReader{simple: true}
	if !p.collectStatements(f.Stmts) || len(p.commands) > 1 && slices.ContainsFunc(p.commands, changesCommands) {
		return nil, false
	}
	return p.commands, p.simple && len(p.commands) == 1
}

// changesCommands reports whether a command can change which programs later command names start, as alias does.
func changesCommands(command []commandWord) bool {
	switch command[0].text {
	case "printf":
		return len(command) > 1 && (!command[1].literal || strings.HasPrefix(command[1].text, "-v"))
	case "alias", "enable", "getopts", "hash", "mapfile", "read", "readarray", "wait":
		return true
	}
	return false
}

func (p *plainScriptReader) collectStatements(list []*syntax.Stmt) bool {
	for _, s := range list {
		if !p.collectStatement(s) {
			return false
		}
	}
	return len(list) > 0
}

func (p *plainScriptReader) collectStatement(s *syntax.Stmt) bool {
	if s.Coprocess || s.Disown {
		return false
	}
	for _, r := range s.Redirs {
		if !p.isHarmlessRedirect(r) {
			return false
		}
	}
	call, isCall := s.Cmd.(*syntax.CallExpr)
	if !isCall || s.Background || s.Negated {
		p.simple = false
	}
	switch c := s.Cmd.(type) {
	case *syntax.CallExpr:
		return p.collectCall(call)
	case *syntax.BinaryCmd:
		return p.collectStatement(c.X) && p.collectStatement(c.Y)
	case *syntax.Subshell:
		return p.collectStatements(c.Stmts)
	case *syntax.Block:
		return p.collectStatements(c.Stmts)
	case *syntax.IfClause:
		for ; c != nil; c = c.Else {
			if len(c.Cond) > 0 && !p.collectStatements(c.Cond) || !p.collectStatements(c.Then) {
				return false
			}
		}
		return true
	case *syntax.WhileClause:
		return p.collectStatements(c.Cond) && p.collectStatements(c.Do)
	}
	return false // among others functions, loops over words and tests, which assign variables or evaluate words
}

func (p *plainScriptReader) collectCall(c *syntax.CallExpr) bool {
	if len(c.Assigns) > 0 || len(c.Args) == 0 {
		return false
	}
	for _, w := range c.Args {
		if !p.isKnownWord(w) {
			return false
		}
	}
	p.commands = append(p.commands, readWords(c.Args))
	return true
}

func (p *plainScriptReader) isKnownWord(w *syntax.Word) bool {
	return w == nil || p.areKnownParts(w.Parts)
}

func (p *plainScriptReader) areKnownParts(list []syntax.WordPart) bool {
	for _, part := range list {
		ok := false
		switch x := part.(type) {
		case *syntax.Lit, *syntax.SglQuoted:
			ok = true
		case *syntax.DblQuoted:
			ok = p.areKnownParts(x.Parts)
		case *syntax.ParamExp:
			// Other expansions can assign variables or evaluate their values.
			ok = x.Param != nil && x.Flags == nil && !x.Excl && !x.Length && !x.Width && !x.IsSet && x.Split == 0 && x.GlobSubst == 0 &&
				x.RcExpand == 0 && x.NestedParam == nil && x.Index == nil && x.Modifiers == nil && x.Slice == nil && x.Repl == nil && x.Names == 0 && x.Exp == nil
		case *syntax.CmdSubst:
			p.simple = false
			ok = !x.TempFile && !x.ReplyVar && p.collectStatements(x.Stmts)
		case *syntax.ProcSubst:
			p.simple = false
			ok = p.collectStatements(x.Stmts)
		}
		if !ok {
			return false
		}
	}
	return true
}

var heredocDelimiter = regexp.MustCompile(`^[A-Za-z0-9_]+$`)

// isHarmlessRedirect reports whether a redirection neither writes a file nor connects to a host.
func (p *plainScriptReader) isHarmlessRedirect(r *syntax.Redirect) bool {
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
		return target.literal && heredocDelimiter.MatchString(target.text) && p.isKnownWord(r.Hdoc)
	case syntax.WordHdoc:
		return p.isKnownWord(r.Word)
	}
	return false
}

func readWords(list []*syntax.Word) []commandWord {
	out := make([]commandWord, len(list))
	for i, w := range list {
		out[i] = readWord(w)
	}
	return out
}

// readWord returns a word of the script with its quotes and escapes removed.
func readWord(w *syntax.Word) commandWord {
	var b strings.Builder
	out := commandWord{literal: true}
	if w == nil {
		return commandWord{}
	}
	for i, part := range w.Parts {
		switch x := part.(type) {
		case *syntax.Lit:
			text, ok := unescapeLiteral(x.Value, "")
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
				text, _ := unescapeLiteral(lit.Value, "\"\\$`")
				b.WriteString(text)
			}
		default:
			out.literal = false
		}
	}
	out.text = b.String()
	return out
}

// unescapeLiteral removes the backslashes of a literal. quoted are the characters that a backslash escapes inside of
// double quotes, or "" outside of them. unescapeLiteral reports whether the literal has no pattern that the shell
// expands.
func unescapeLiteral(s, quoted string) (string, bool) {
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
