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
	maxShownCommand = 120 // bytes of a command that a class shows whole
	maxClassLength  = 512 // bytes of a class
)

// plainWord matches words of a command that the text of a class shows without quotes.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9_./+@:=,-]+$`)

// hasSubcommands holds the programs, such as git, whose first argument is a subcommand.
var hasSubcommands = map[string]bool{
	"apt": true, "apt-get": true, "aws": true, "az": true, "brew": true, "bun": true, "bundle": true, "cargo": true, "composer": true, "deno": true,
	"docker": true, "dotnet": true, "gcloud": true, "gem": true, "gh": true, "git": true, "go": true, "gradle": true, "helm": true, "kubectl": true,
	"make": true, "mvn": true, "npm": true, "npx": true, "pip": true, "pip3": true, "pnpm": true, "podman": true, "poetry": true, "rustup": true,
	"systemctl": true, "terraform": true, "uv": true, "yarn": true,
}

// Class returns the class of calls that a person approves together with this call ("approve all"), as a text for
// people. Calls with equal texts belong to the same class, and the text describes all calls of the class. "" means that
// the call can only be approved alone.
func (p *Policy) Class(c Call) string { return newAnalyzedCall(c).class() }

func (s *analyzedCall) class() string {
	out := ""
	switch {
	case s.Kind == KindQuestion:
		return ""
	case s.Command != "":
		return commandClass(s.Command, s.script())
	case s.Kind == KindRead:
		out = s.fileClass("reads")
	case s.Kind == KindEdit && len(s.paths) > 0:
		out = s.fileClass("changes")
	case s.Kind == KindNetwork && len(s.hosts) > 0:
		out = hostClass(s.hosts)
	case s.Kind == KindAgent:
		return "sub-agents"
	case s.Kind != KindEdit:
		out = "calls of " + s.Tool
	}
	if len(out) > maxClassLength || strings.ContainsFunc(out, isHidden) {
		return ""
	}
	return out
}

// isHidden reports whether terminals display a character as something else or not at all.
func isHidden(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == unicode.ReplacementChar || r != ' ' && unicode.IsSpace(r)
}

// commandClass returns the class of a shell command: all commands with the same program and, for programs such as git,
// the same subcommand, or else this command alone.
func commandClass(command string, s *shellScript) string {
	if words := programAndSubcommand(s); words != "" && len(words) <= maxShownCommand {
		return "commands that begin with `" + words + "`"
	}
	if len(command) <= maxShownCommand && !strings.ContainsFunc(command, func(r rune) bool { return isHidden(r) || r == '`' }) {
		return "the command `" + command + "`"
	}
	shown := strings.Map(func(r rune) rune {
		if isHidden(r) || r == '`' {
			return ' '
		}
		return r
	}, truncate.Prefix(command, maxShownCommand))
	return fmt.Sprintf("the command `%s…` (SHA-256 %.16x)", strings.TrimSpace(shown), sha256.Sum256([]byte(command)))
}

// programAndSubcommand returns the program of a script that is one simple command, followed by the subcommand of a
// program that has some. It returns "" for other scripts.
func programAndSubcommand(s *shellScript) string {
	if !s.simple || s.opaque {
		return ""
	}
	command := s.commands[0]
	isPlain := func(w commandWord) bool { return w.literal && !w.tilde && plainWord.MatchString(w.text) }
	program := path.Base(command[0].text)
	if !isPlain(command[0]) || startsOtherPrograms(program) {
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

// fileClass returns the class of calls that do the same, such as "reads", to files in the same folders.
func (s *analyzedCall) fileClass(does string) string {
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
	return fmt.Sprintf("%s of files in %s", does, joinUnique(folders))
}

// hostClass returns the class of requests to the same hosts.
func hostClass(hosts []string) string {
	if slices.ContainsFunc(hosts, func(h string) bool { return h == "" || strings.ContainsAny(h, ", `") }) {
		return ""
	}
	return "requests to " + joinUnique(hosts)
}

// joinUnique returns the distinct entries in sorted order, separated by commas.
func joinUnique(entries []string) string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(entries))), ", ")
}
