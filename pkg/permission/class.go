package permission

import (
	"crypto/sha256"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/spoolhq/spool/pkg/truncate"
)

const (
	maxExact = 120 // bytes of a command that a class shows whole
	maxClass = 512 // bytes of a class
)

// plainWord matches the words that a class shows as they are.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9_./+@:=,-]+$`)

// hasSubcommands holds the programs whose first argument names what they do.
var hasSubcommands = map[string]bool{
	"apt": true, "apt-get": true, "aws": true, "az": true, "brew": true, "bun": true, "bundle": true, "cargo": true, "composer": true, "deno": true,
	"docker": true, "dotnet": true, "gcloud": true, "gem": true, "gh": true, "git": true, "go": true, "gradle": true, "helm": true, "kubectl": true,
	"make": true, "mvn": true, "npm": true, "npx": true, "pip": true, "pip3": true, "pnpm": true, "podman": true, "poetry": true, "rustup": true,
	"systemctl": true, "terraform": true, "uv": true, "yarn": true,
}

// Class returns the class of calls that a person approves together with this call ("approve all"), as text for people. Calls
// whose classes are equal belong to the same class, which has no other calls than the text says. "" means that the call can
// only be approved alone.
func (p *Policy) Class(c Call) string { return newSubject(c).class() }

func (s *subject) class() string {
	out := ""
	switch {
	case s.Kind == Question:
		return ""
	case s.Command != "":
		return commandClass(s.Command, s.script())
	case s.Kind == Read:
		out = s.fileClass("reads")
	case s.Kind == Edit && len(s.paths) > 0:
		out = s.fileClass("changes")
	case s.Kind == Network && len(s.hosts) > 0:
		out = hostClass(s.hosts)
	case s.Kind == Agent:
		return "sub-agents"
	case s.Kind != Edit:
		out = "calls of " + s.Tool
	}
	if len(out) > maxClass || strings.ContainsFunc(out, isHidden) {
		return ""
	}
	return out
}

// isHidden reports whether a terminal does not show a character as it is.
func isHidden(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == unicode.ReplacementChar || r != ' ' && unicode.IsSpace(r)
}

// commandClass returns the class of a shell command: of all commands with the same program, and with the same subcommand of a
// program that has some, or else of this command alone.
func commandClass(command string, s *script) string {
	if words := prefix(s); words != "" && len(words) <= maxExact {
		return "commands that begin with `" + words + "`"
	}
	if len(command) <= maxExact && !strings.ContainsFunc(command, func(r rune) bool { return isHidden(r) || r == '`' }) {
		return "the command `" + command + "`"
	}
	shown := strings.Map(func(r rune) rune {
		if isHidden(r) || r == '`' {
			return ' '
		}
		return r
	}, truncate.Prefix(command, maxExact))
	return fmt.Sprintf("the command `%s…` (SHA-256 %.16x)", strings.TrimSpace(shown), sha256.Sum256([]byte(command)))
}

// prefix returns the program of a script that is one simple command, with the subcommand, or "".
func prefix(s *script) string {
	if !s.simple || s.opaque {
		return ""
	}
	command := s.commands[0]
	isPlain := func(w word) bool { return w.literal && !w.tilde && plainWord.MatchString(w.text) }
	program := path.Base(command[0].text)
	if !isPlain(command[0]) || startsOthers(program) {
		return ""
	}
	if !hasSubcommands[program] {
		return command[0].text
	}
	if len(command) < 2 || !isPlain(command[1]) || strings.HasPrefix(command[1].text, "-") {
		return ""
	}
	return command[0].text + " " + command[1].text
}

// fileClass returns the class of calls that do something to files in the same folders.
func (s *subject) fileClass(does string) string {
	var folders []string
	for _, p := range s.paths {
		switch {
		case p == "" || strings.ContainsAny(p, ",`"):
			return ""
		case path.IsAbs(p):
			folders = append(folders, path.Dir(p))
		default:
			folders = append(folders, "the workspace")
		}
	}
	if len(folders) == 0 {
		folders = []string{"the workspace"}
	}
	return fmt.Sprintf("%s of files in %s", does, list(folders))
}

func hostClass(hosts []string) string {
	if slices.ContainsFunc(hosts, func(h string) bool { return h == "" || strings.ContainsAny(h, ", `") }) {
		return ""
	}
	return "requests to " + list(hosts)
}

// list returns the different entries in order.
func list(entries []string) string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(entries))), ", ")
}
